"""Mixed precision: autocast in forward and loss, and a loss scale for float16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.optim.kernels import hold_momentum, kernels_chosen, use_fused, why_not_fused
from slipstream.optim.optim_wrapper import OptimWrapper, device_of
from slipstream.registry import OPTIM_WRAPPERS

__all__ = ["AmpOptimWrapper"]

_DTYPES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """An `OptimWrapper` that runs forward and loss under `torch.autocast`, on any device.

    Fused kernels leave a step with an overflow out by themselves. With float16 on an accelerator, optimizers
    that have them therefore use them, unless they were built with `fused=` or `foreach=`; other optimizers
    make the host wait in each step for the device to say whether a gradient overflowed.

    Args:
        loss_scale: for float16 only, since bfloat16 has float32's range and needs none: `"dynamic"`, a
            fixed number, or the options of `torch.amp.GradScaler`.
        dtype: `"float16"`, `"bfloat16"`, a `torch.dtype`, or None for the device's own default (float16
            on CUDA and NPU, bfloat16 on the CPU).
        kwargs: those of `OptimWrapper`.
    """

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._given_dtype = _read_dtype(dtype)
        self._loss_scale = loss_scale
        self._fixed_scale = float(loss_scale) if isinstance(loss_scale, int | float) else None
        _make_scaler("cpu", loss_scale)  # whatever the dtype and device, so that a mistake is always found

    # Read at the first step: a wrapper may be made before its model is moved to the device.

    @cached_property
    def device_type(self) -> str:
        """The kind of device that the parameters are on."""
        return device_of(self.optimizer).type

    @cached_property
    def dtype(self) -> torch.dtype:
        """The lower precision."""
        return self._given_dtype or torch.get_autocast_dtype(self.device_type)

    @cached_property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale, for float16 only."""
        if self.dtype != torch.float16:
            return None
        accelerated = self.device_type != "cpu"
        if accelerated and not kernels_chosen(self.optimizer) and why_not_fused(self.optimizer) is None:
            use_fused(self.optimizer)
        return _make_scaler(self.device_type, self._loss_scale)

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context of forward and loss: autocast, without gradient sync inside a window."""
        autocast = self.autocast()
        if self._accumulative_counts == 1 and self.guard is None:
            return autocast
        stack = ExitStack()
        stack.enter_context(super().optim_context(model))
        stack.enter_context(autocast)
        return stack

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision of forward and loss alone."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def adapts_scale(self) -> bool:
        """Whether overflows change the loss scale: not if it was given as a number."""
        return self._fixed_scale is None

    def _amplify(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaler is None else self.loss_scaler.scale(loss)

    def step(self, **kwargs: Any) -> None:
        """Unscale, clip, step unless a gradient overflowed, and adapt the scale."""
        if self.loss_scaler is None:
            super().step(**kwargs)
            return
        scaler = self.loss_scaler
        if self.parts:
            scaler.unscale_(self.optimizer)
        hold_momentum(self.optimizer)
        self._apply_parts(lambda: scaler.step(self.optimizer, **kwargs))
        scaler.update(self._fixed_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the scaler's as `loss_scaler` if there is one."""
        state = super().state_dict()
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer's and the scaler's state; either may come from a run without a scaler."""
        state = dict(state_dict)
        scaler = state.pop("loss_scaler", None)
        if self.loss_scaler is not None and scaler:
            self.loss_scaler.load_state_dict(scaler)
        super().load_state_dict(state)


def _read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype in (torch.float16, torch.bfloat16):
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ConfigError(f"must be 'float16', 'bfloat16' or None, not {dtype!r}", "dtype")


def _make_scaler(device: str, loss_scale: str | float | Mapping[str, Any]) -> torch.amp.GradScaler:
    if loss_scale == "dynamic":
        options: Mapping[str, Any] = {}
    elif isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool) and loss_scale > 0:
        options = {"init_scale": float(loss_scale)}
    elif isinstance(loss_scale, Mapping):
        options = loss_scale
    else:
        raise ConfigError(f"must be 'dynamic', a positive number or a dict, not {loss_scale!r}", "loss_scale")
    try:
        return torch.amp.GradScaler(device, **options)
    except (TypeError, AssertionError) as error:
        raise ConfigError(str(error), "loss_scale") from error
