"""Ascend's fused optimizers by name: torch_npu's where it is installed, else others of the same maths."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.optim.kernels import kernels_chosen, use_fused, why_not_fused
from slipstream.registry import OPTIMIZERS

__all__ = [
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]


def _register(
    algorithm: str, module: str, adapt: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> Callable[..., Optimizer]:
    """Register `NpuFused<algorithm>`.

    Args:
        algorithm: also the name of the class of the same maths.
        module: where that class is.
        adapt: turns torch_npu's arguments into those of that class.
    """
    name, same = f"NpuFused{algorithm}", f"{module}.{algorithm}"

    def build(params: Any, strict_npu: bool = False, **kwargs: Any) -> Optimizer:
        native, reason = _torch_npu_class(name)
        if native is not None:
            optimizer: Optimizer = native(params, **kwargs)
            return optimizer
        if strict_npu:
            raise ConfigError(
                f"{name} needs torch_npu ({reason}): install it on Ascend, or leave out strict_npu, and {same} "
                "of the same maths stands in"
            )
        stand_in = _stand_in(name, module, algorithm)
        print_log(f"{name}: {reason}; {same} stands in", "current", logging.WARNING)
        return _fastest(stand_in(params, **adapt(kwargs)))

    build.__name__ = build.__qualname__ = name
    build.__doc__ = (
        f"Return `torch_npu.optim.{name}`, or `{same}` where torch_npu is not and `strict_npu` allows it."
    )
    OPTIMIZERS.register_module(module=build)
    return build


def _torch_npu_class(name: str) -> tuple[Callable[..., Optimizer] | None, str]:
    """Return torch_npu's class, or None and why it cannot be had."""
    try:
        torch_npu = importlib.import_module("torch_npu")
        optim = getattr(torch_npu, "optim", None) or importlib.import_module("torch_npu.optim")
    except ImportError as error:
        return None, str(error)
    found = getattr(optim, name, None)
    return found, "" if found else f"torch_npu.optim has no {name}"


def _stand_in(name: str, module: str, algorithm: str) -> Callable[..., Optimizer]:
    try:
        found: Callable[..., Optimizer] = getattr(importlib.import_module(module), algorithm)
    except ImportError as error:
        raise ConfigError(
            f"{name} needs torch_npu on Ascend, and elsewhere {module}.{algorithm}, but {error}: "
            "pip install 'slipstream[optimizers]'"
        ) from error
    return found


def _fastest(optimizer: Optimizer) -> Optimizer:
    """Let it run fused kernels, as its name promises, if it can and nothing else was asked for."""
    if not kernels_chosen(optimizer) and why_not_fused(optimizer) is None:
        use_fused(optimizer)
    return optimizer


def _lamb(options: dict[str, Any]) -> dict[str, Any]:
    # Decay belongs to the update that the trust ratio measures, as in the paper. adam_debias, the other way round
    # than it sounds, leaves the step size as it is; without it the library divides by `1 - beta1^t`.
    options = {"weight_decouple": False, "adam_debias": True, **options}
    if "use_global_grad_norm" in options:
        options["pre_norm"] = options.pop("use_global_grad_norm")
    return options


def _adamp(options: dict[str, Any]) -> dict[str, Any]:
    return {"foreach": None, **options}  # its default is a loop that reads the device for each weight


NpuFusedAdadelta = _register("Adadelta", "torch.optim")
NpuFusedAdam = _register("Adam", "torch.optim")
NpuFusedAdamP = _register("AdamP", "pytorch_optimizer", _adamp)
NpuFusedAdamW = _register("AdamW", "torch.optim")
NpuFusedBertAdam = _register("BertAdam", "slipstream.optim")
NpuFusedLamb = _register("Lamb", "pytorch_optimizer", _lamb)
NpuFusedRMSprop = _register("RMSprop", "torch.optim")
NpuFusedRMSpropTF = _register("RMSpropTF", "slipstream.optim")
NpuFusedSGD = _register("SGD", "torch.optim")
