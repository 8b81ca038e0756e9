"""Functions that initialize the weight and bias of one module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.weight_init import (
    Caffe2XavierInit,
    ConstantInit,
    KaimingInit,
    NormalInit,
    PretrainedInit,
    TruncNormalInit,
    UniformInit,
    XavierInit,
)
from slipstream.model.weight_init import initialize as initialize_all
from slipstream.openmmlab.mmengine.registry import WEIGHT_INITIALIZERS

__all__ = [
    "Caffe2XavierInit",
    "ConstantInit",
    "KaimingInit",
    "NormalInit",
    "PretrainedInit",
    "TruncNormalInit",
    "UniformInit",
    "XavierInit",
    "bias_init_with_prob",
    "caffe2_xavier_init",
    "constant_init",
    "initialize",
    "kaiming_init",
    "normal_init",
    "trunc_normal_",
    "trunc_normal_init",
    "uniform_init",
    "xavier_init",
]


_LAYER_INITIALIZERS = (
    Caffe2XavierInit,
    ConstantInit,
    KaimingInit,
    NormalInit,
    TruncNormalInit,
    UniformInit,
    XavierInit,
)


def initialize(module: nn.Module, init_cfg: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Apply initializers as Slipstream does, but ignore layer initializers that set neither `layer` nor `override`."""
    for cfg in [init_cfg] if isinstance(init_cfg, Mapping) else init_cfg:
        kind = cfg.get("type")
        target = WEIGHT_INITIALIZERS.get(kind) if isinstance(kind, str) else kind
        is_layer_initializer = isinstance(target, type) and issubclass(target, _LAYER_INITIALIZERS)
        if cfg.get("layer") or cfg.get("override") or not is_layer_initializer:
            initialize_all(module, cfg)


def _weight(module: Any) -> Tensor | None:
    weight: Tensor | None = getattr(module, "weight", None)
    return weight


def _set_bias(module: Any, value: float) -> None:
    if getattr(module, "bias", None) is not None:
        nn.init.constant_(module.bias, value)


def constant_init(module: nn.Module, val: float, bias: float = 0) -> None:
    """Fill the weight with `val` and the bias with `bias`."""
    if (weight := _weight(module)) is not None:
        nn.init.constant_(weight, val)
    _set_bias(module, bias)


def xavier_init(module: nn.Module, gain: float = 1, bias: float = 0, distribution: str = "normal") -> None:
    """Initialize the weight as in Glorot and Bengio 2010, and fill the bias with `bias`."""
    assert distribution in ("uniform", "normal"), f"unknown distribution {distribution!r}"
    draw = nn.init.xavier_uniform_ if distribution == "uniform" else nn.init.xavier_normal_
    if (weight := _weight(module)) is not None:
        draw(weight, gain=gain)
    _set_bias(module, bias)


def normal_init(module: nn.Module, mean: float = 0, std: float = 1, bias: float = 0) -> None:
    """Draw the weight from N(mean, std^2), and fill the bias with `bias`."""
    if (weight := _weight(module)) is not None:
        nn.init.normal_(weight, mean, std)
    _set_bias(module, bias)


def trunc_normal_init(
    module: nn.Module, mean: float = 0, std: float = 1, a: float = -2, b: float = 2, bias: float = 0
) -> None:
    """Draw the weight from N(mean, std^2) truncated to [a, b], and fill the bias with `bias`."""
    if (weight := _weight(module)) is not None:
        trunc_normal_(weight, mean, std, a, b)
    _set_bias(module, bias)


def uniform_init(module: nn.Module, a: float = 0, b: float = 1, bias: float = 0) -> None:
    """Draw the weight from U(a, b), and fill the bias with `bias`."""
    if (weight := _weight(module)) is not None:
        nn.init.uniform_(weight, a, b)
    _set_bias(module, bias)


def kaiming_init(
    module: nn.Module,
    a: float = 0,
    mode: Any = "fan_out",
    nonlinearity: Any = "relu",
    bias: float = 0,
    distribution: str = "normal",
) -> None:
    """Initialize the weight as in He et al. 2015, and fill the bias with `bias`."""
    assert distribution in ("uniform", "normal"), f"unknown distribution {distribution!r}"
    draw = nn.init.kaiming_uniform_ if distribution == "uniform" else nn.init.kaiming_normal_
    if (weight := _weight(module)) is not None:
        draw(weight, a=a, mode=mode, nonlinearity=nonlinearity)
    _set_bias(module, bias)


def caffe2_xavier_init(module: nn.Module, bias: float = 0) -> None:
    """Initialize the weight like Caffe2's XavierFill, and fill the bias with `bias`."""
    kaiming_init(module, a=1, mode="fan_in", nonlinearity="leaky_relu", bias=bias, distribution="uniform")


def bias_init_with_prob(prior_prob: float) -> float:
    """Return the bias whose sigmoid is `prior_prob`."""
    return -math.log((1 - prior_prob) / prior_prob)


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    """Fill `tensor` with values from N(mean, std^2) truncated to [a, b], and return `tensor`."""
    with torch.no_grad():
        return nn.init.trunc_normal_(tensor, mean, std, a, b)
