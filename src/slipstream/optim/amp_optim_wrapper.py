"""Mixed precision: autocast for the forward pass and loss, and loss scaling for float16."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.optim.kernels import has_explicit_kernels, use_fused, why_not_fused
from slipstream.optim.optim_wrapper import OptimWrapper
from slipstream.registry import OPTIM_WRAPPERS
from slipstream.step.numerics import LossScale
from slipstream.typecheck import Positive, matches, short_repr

_DTYPES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """An `OptimWrapper` that runs the forward pass and loss under `torch.autocast`, on any device.

    If a gradient overflows, fused kernels skip the step without synchronizing with the host. Therefore, with float16 on
    an accelerator, an optimizer that has fused kernels uses them, unless it was constructed with `fused=` or
    `foreach=`. With other optimizers, the host synchronizes with the device in each step to check for an overflow.

    Args:
        loss_scale: `"dynamic"`, a fixed scale, or the options for `torch.amp.GradScaler`; used only for float16,
            because bfloat16 has the same range as float32 and does not require scaling.
        dtype: `"float16"`, `"bfloat16"`, a `torch.dtype`, or None for the device's default autocast dtype (float16 on
            CUDA and NPU, bfloat16 on the CPU).
        kwargs: arguments for `OptimWrapper`.
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
        _make_scaler("cpu", loss_scale)  # validate the options regardless of the dtype and device

    # These properties are evaluated in the first step, because the wrapper may be created before its model is moved to
    # the device.

    @cached_property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Autocast dtype."""
        return self._requested_dtype or torch.get_autocast_dtype(self.device_type)

    @cached_property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Loss scaler; None unless the dtype is float16."""
        if self.dtype != torch.float16:
            return None
        accelerated = self.device_type != "cpu"
        if accelerated and not has_explicit_kernels(self.optimizer) and why_not_fused(self.optimizer) is None:
            use_fused(self.optimizer)
        return _make_scaler(self.device_type, self._loss_scale)

    @cached_property
    def loss_scale(self) -> LossScale | None:  # type: ignore[override]
        """The loss scale, which uses the tensors of `loss_scaler`; None unless the dtype is float16."""
        device = next(self.parameters()).device
        scaler = self.loss_scaler
        return None if scaler is None else LossScale(scaler, self._fixed_scale is None, device)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state and, if there is a loss scaler, its state as `loss_scaler`."""
        state = super().state_dict()
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer state and, if it was saved, the loss scaler's state."""
        state = dict(state_dict)
        scaler = state.pop("loss_scaler", None)
        if self.loss_scaler is not None and scaler:
            self.loss_scaler.load_state_dict(scaler)
            self.__dict__.pop("loss_scale", None)
        super().load_state_dict(state)


def _read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype in (torch.float16, torch.bfloat16):
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ConfigError(f"must be 'float16', 'bfloat16' or None, not {dtype!r}", "dtype")


def _make_scaler(device: str, loss_scale: str | float | Mapping[str, Any]) -> torch.amp.GradScaler:
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        loss_scale = {}
    elif matches(loss_scale, Positive):
        loss_scale = {"init_scale": loss_scale}
    elif not isinstance(loss_scale, Mapping):
        raise ConfigError(
            f"must be 'dynamic', a positive number or a dict, not {short_repr(loss_scale)}", "loss_scale"
        )
    try:
        return torch.amp.GradScaler(device, **loss_scale)
    except (AssertionError, TypeError) as error:
        raise ConfigError(str(error), "loss_scale") from error
