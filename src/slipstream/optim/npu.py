"""Ascend's fused optimizers by name: torch_npu's where it is installed, else torch's of the same maths."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from slipstream.errors import ConfigError
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


def _register(algorithm: str, same: str | None = None, nearest: str = "") -> Callable[..., Optimizer]:
    """Register `NpuFused<algorithm>`; `same`: torch's class of the same maths, `nearest`: what is close."""
    name = f"NpuFused{algorithm}"

    def build(params: Any, strict_npu: bool = False, **kwargs: Any) -> Optimizer:
        native, reason = _torch_npu_class(name)
        if native is not None:
            optimizer: Optimizer = native(params, **kwargs)
            return optimizer
        if same is None or strict_npu:
            instead = f"take {same or nearest}" + (" or leave out strict_npu" if same else "")
            raise ConfigError(f"{name} needs torch_npu ({reason}): install it on Ascend, or {instead}")
        logging.getLogger("slipstream").warning("%s: %s; torch.optim.%s stands in", name, reason, same)
        return _stand_in(getattr(torch.optim, same), params, kwargs)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Return `torch_npu.optim.{name}`" + (
        f", or `torch.optim.{same}` where torch_npu is missing and `strict_npu` is not set." if same else "."
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


def _stand_in(cls: Callable[..., Optimizer], params: Any, kwargs: dict[str, Any]) -> Optimizer:
    # Where there is no fused kernel torch itself takes its foreach kernels if the device has them.
    params = list(params)  # an iterator is read twice here
    if "fused" in inspect.signature(cls).parameters and "foreach" not in kwargs:
        devices = _get_fused_kernels_supported_devices()
        fits = all(p.is_floating_point() and p.device.type in devices for p in _tensors(params))
        kwargs = {"fused": True if fits else None, **kwargs}
    return cls(params, **kwargs)


def _tensors(params: list[Any]) -> Iterator[torch.Tensor]:
    for entry in params:  # a tensor, (name, tensor), or a group of either
        if isinstance(entry, dict):
            group = entry["params"]
            yield from _tensors([group] if isinstance(group, torch.Tensor) else list(group))
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


NpuFusedAdadelta = _register("Adadelta", same="Adadelta")
NpuFusedAdam = _register("Adam", same="Adam")
NpuFusedAdamP = _register("AdamP", nearest="AdamW")
NpuFusedAdamW = _register("AdamW", same="AdamW")
NpuFusedBertAdam = _register("BertAdam", nearest="AdamW with a warm-up (LinearLR) and clip_grad")
NpuFusedLamb = _register("Lamb", nearest="AdamW with a warm-up (LinearLR)")
NpuFusedRMSprop = _register("RMSprop", same="RMSprop")
NpuFusedRMSpropTF = _register("RMSpropTF", nearest="RMSprop with a larger eps")
NpuFusedSGD = _register("SGD", same="SGD")
