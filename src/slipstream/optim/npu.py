"""Fused optimizers for Ascend: torch_npu's classes if torch_npu is installed, otherwise equivalent optimizers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.optim.kernels import has_explicit_kernels, use_fused, why_not_fused
from slipstream.registry import OPTIMIZERS


def _register(
    algorithm: str, module: str, adapt: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> Callable[..., Optimizer]:
    """Register `NpuFused<algorithm>`.

    Args:
        algorithm: name of the equivalent class.
        module: the module that contains the equivalent class.
        adapt: function that converts torch_npu's arguments to the arguments of the equivalent class.
    """
    name, equivalent = f"NpuFused{algorithm}", f"{module}.{algorithm}"

    def build(params: Any, strict_npu: bool = False, **kwargs: Any) -> Optimizer:
        native, reason = _torch_npu_class(name)
        if native is not None:
            return native(params, **kwargs)
        if strict_npu:
            raise ConfigError(
                f"{name} requires torch_npu ({reason}); install it on Ascend, or remove strict_npu to use the "
                f"equivalent {equivalent}"
            )
        try:
            substitute = getattr(importlib.import_module(module), algorithm)
        except ImportError as error:
            raise ConfigError(
                f"{name} requires torch_npu on Ascend, or {equivalent} on other devices; run "
                f"pip install 'slipstream[optimizers]' (importing {module} failed: {error})"
            ) from error
        print_log(f"{name}: {reason}; using {equivalent} instead", "current", logging.WARNING)
        optimizer = substitute(params, **adapt(kwargs))
        if not has_explicit_kernels(optimizer) and why_not_fused(optimizer) is None:
            use_fused(optimizer)
        return optimizer

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Return a `torch_npu.optim.{name}`, or a `{equivalent}` if torch_npu is not available."
    OPTIMIZERS.register_module(module=build)
    return build


def _torch_npu_class(name: str) -> tuple[Callable[..., Optimizer] | None, str]:
    """Return torch_npu's class and an empty string, or None and the reason why this class is not available."""
    try:
        torch_npu = importlib.import_module("torch_npu")
        optim = getattr(torch_npu, "optim", None) or importlib.import_module("torch_npu.optim")
    except ImportError as error:
        return None, str(error)
    found = getattr(optim, name, None)
    return found, "" if found else f"torch_npu.optim has no {name}"


def _lamb(options: dict[str, Any]) -> dict[str, Any]:
    # As in the paper, the trust ratio includes weight decay. Despite its name, adam_debias=True disables bias
    # correction of the step size; with False, pytorch_optimizer divides the step size by `1 - beta1^t`.
    options = {"weight_decouple": False, "adam_debias": True, **options}
    if "use_global_grad_norm" in options:
        options["pre_norm"] = options.pop("use_global_grad_norm")
    return options


def _adamp(options: dict[str, Any]) -> dict[str, Any]:
    return {"foreach": None, **options}  # pytorch_optimizer's default loop synchronizes once per weight


NpuFusedAdadelta = _register("Adadelta", "torch.optim")
NpuFusedAdam = _register("Adam", "torch.optim")
NpuFusedAdamP = _register("AdamP", "pytorch_optimizer", _adamp)
NpuFusedAdamW = _register("AdamW", "torch.optim")
NpuFusedBertAdam = _register("BertAdam", "slipstream.optim")
NpuFusedLamb = _register("Lamb", "pytorch_optimizer", _lamb)
NpuFusedRMSprop = _register("RMSprop", "torch.optim")
NpuFusedRMSpropTF = _register("RMSpropTF", "slipstream.optim")
NpuFusedSGD = _register("SGD", "torch.optim")
