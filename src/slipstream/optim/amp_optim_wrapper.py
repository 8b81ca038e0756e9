"""Mixed precision: autocast in forward and loss, and loss scaling for float16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.optim.kernels import init_momentum, kernels_chosen, use_fused, why_not_fused
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

    Fused kernels skip a step with an overflow without synchronization. With float16 on an accelerator, optimizers
    that support fused kernels therefore use them, unless they were built with `fused=` or `foreach=`. With other
    optimizers, the host synchronizes with the device in each step to check for an overflow.

    Args:
        loss_scale: `"dynamic"`, a fixed number, or the options of `torch.amp.GradScaler`. Only used for float16;
            bfloat16 has the range of float32 and needs no scaling.
        dtype: `"float16"`, `"bfloat16"`, a `torch.dtype`, or None for the autocast dtype of the device (float16
            on CUDA and NPU, bfloat16 on the CPU).
        kwargs: arguments of `OptimWrapper`.
    """

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._requested_dtype = _read_dtype(dtype)
        self._loss_scale = loss_scale
        self._fixed_scale = float(loss_scale) if isinstance(loss_scale, int | float) else None
        _make_scaler("cpu", loss_scale)  # checks the options for every dtype and device

    # These properties are read at the first step, because the wrapper may be created before its model is moved to the
    # device.

    @cached_property
    def device_type(self) -> str:
        """Device type of the parameters."""
        return device_of(self.optimizer).type

    @cached_property
    def dtype(self) -> torch.dtype:
        """Autocast dtype."""
        return self._requested_dtype or torch.get_autocast_dtype(self.device_type)

    @cached_property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Loss scaler; None unless the dtype is float16."""
        if self.dtype != torch.float16:
            return None
        accelerated = self.device_type != "cpu"
        if accelerated and not kernels_chosen(self.optimizer) and why_not_fused(self.optimizer) is None:
            use_fused(self.optimizer)
        return _make_scaler(self.device_type, self._loss_scale)

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context of forward and loss: autocast, and `no_sync` inside an accumulation window."""
        autocast = self.autocast()
        if self._accumulative_counts == 1 and self.guard is None:
            return autocast
        stack = ExitStack()
        stack.enter_context(super().optim_context(model))
        stack.enter_context(autocast)
        return stack

    def autocast(self) -> AbstractContextManager[Any]:
        """Return only the autocast context."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def adapts_scale(self) -> bool:
        """Whether overflows change the loss scale; False for a fixed scale."""
        return self._fixed_scale is None

    def _amplify(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaler is None else self.loss_scaler.scale(loss)

    def step(self, **kwargs: Any) -> None:
        """Unscale, clip, step unless a gradient overflowed, and adapt the scale."""
        if self.loss_scaler is None:
            super().step(**kwargs)
            return
        scaler = self.loss_scaler
        finite = None
        if self.parts:
            scaler.unscale_(self.optimizer)
            finite = _no_overflow(scaler, self.optimizer)
        init_momentum(self.optimizer)
        self._apply_parts(lambda: scaler.step(self.optimizer, **kwargs), finite)
        scaler.update(self._fixed_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state, and the loss scaler's state as `loss_scaler` if there is one."""
        state = super().state_dict()
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of optimizer and loss scaler; the saved run may have had no loss scaler."""
        state = dict(state_dict)
        scaler = state.pop("loss_scaler", None)
        if self.loss_scaler is not None and scaler:
            self.loss_scaler.load_state_dict(scaler)
        super().load_state_dict(state)


def _no_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Tensor:
    """Return whether all gradients that `scaler` has unscaled are finite, as a 0-dim bool tensor."""
    counts = list(scaler._found_inf_per_device(optimizer).values())
    total: Tensor = sum((count.to(counts[0].device) for count in counts[1:]), start=counts[0])
    return total == 0


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
