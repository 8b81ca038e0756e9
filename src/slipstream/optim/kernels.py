"""Optimizer kernels: fused kernels or torch's default implementation, and the memory formats that they require.

torch's fused optimizers read parameters, gradients and states as flat arrays, so different strides silently produce
wrong results.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.sharding import is_sharded

# Fused kernels that torch can run on a `DTensor`.
_SUPPORTED_ON_SHARDS = ("_fused_adam_", "_fused_adamw_")


def has_explicit_kernels(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` was constructed with `fused=` or `foreach=`."""
    return any(group.get(key) is not None for group in optimizer.param_groups for key in ("fused", "foreach"))


def why_not_fused(optimizer: Optimizer) -> str | None:
    """Return why `optimizer` cannot use fused kernels, or None if it can."""
    name, kernel = type(optimizer).__name__, _fused_kernel(type(optimizer))
    if kernel is None or "fused" not in optimizer.defaults:
        supported = (other for other in dir(torch.optim) if hasattr(torch, f"_fused_{other.lower()}_"))
        return f"{name} has no fused kernels; the optimizers with fused kernels are {', '.join(supported)}"
    if any(group["differentiable"] for group in optimizer.param_groups):
        return "fused kernels do not support differentiable=True"
    for param in _parameters(optimizer):
        if not _runs_on(kernel, param.device):
            return f"torch has no fused {name} kernel for {param.device.type}"
        if kernel == "_fused_adagrad_" and param.device.type == "cuda" and torch.__version__ < "2.12":
            return f"the fused {name} kernel for cuda requires torch 2.12 or newer"
        if not param.is_floating_point():
            return f"fused kernels support floating-point parameters only, not {param.dtype}"
        if not is_sharded(param) and not is_lazy(param) and not is_dense(param):
            return "fused kernels do not support parameters with gaps or overlaps in memory"
        if is_sharded(param) and kernel not in _SUPPORTED_ON_SHARDS:
            return f"torch has no fused {name} kernel for sharded parameters; only Adam and AdamW have one"
    return None


def use_fused(optimizer: Optimizer) -> None:
    """Switch an optimizer to fused kernels, as if it had been constructed with `fused=True`.

    Call this function only if `why_not_fused` returns None.
    """
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update(fused=True, foreach=None)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler reads this attribute
    for param in _parameters(optimizer):
        if "step" in (state := optimizer.state.get(param, {})):  # fused kernels count steps on the device
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)


def fuse(optimizer: Optimizer, wanted: bool | None) -> bool:
    """Switch `optimizer` to fused kernels according to `wanted`; return whether it uses them.

    By default, torch uses foreach kernels on accelerators and a loop over the weights on the CPU.

    Args:
        optimizer: the optimizer, which may already have taken steps.
        wanted: True requires fused kernels. None selects them if torch provides them for the optimizer class, the
            devices and the dtypes, unless the optimizer was built with `fused=` or `foreach=`. False does not change
            the optimizer.

    Raises:
        ConfigError: `wanted` is True, and fused kernels are not supported.
    """
    if wanted is None and not has_explicit_kernels(optimizer) and why_not_fused(optimizer) is None:
        use_fused(optimizer)
    if wanted:
        if any(group.get("foreach") for group in optimizer.param_groups):
            raise ConfigError("the optimizer has foreach=True; use only one of fused and foreach", "fused")
        if reason := why_not_fused(optimizer):
            raise ConfigError(f"{reason}; remove fused to use torch's default kernels", "fused")
        use_fused(optimizer)
    return all(group.get("fused") is True for group in optimizer.param_groups)


def replace_kernel_options(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved state with the kernel options of `optimizer` instead of those of the saved run.

    torch's `load_state_dict` would restore the saved options, even if the current device has no fused kernel.
    """
    groups, options = list(state_dict["param_groups"]), ("fused", "foreach", "capturable")
    for index, own in enumerate(optimizer.param_groups[: len(groups)]):
        groups[index] = {**groups[index], **{key: own[key] for key in options if key in own}}
    # Kernels that are neither fused nor capturable read the step count on the host, which causes a synchronization if
    # the count is on the device.
    state = dict(state_dict["state"])
    for group in groups:
        options_set = [group[key] for key in ("fused", "capturable") if key in group]
        for index in group["params"] if options_set and not any(options_set) else ():
            if isinstance(step := state.get(index, {}).get("step"), Tensor):
                state[index] = {**state[index], "step": step.cpu()}
    return {**state_dict, "state": state, "param_groups": groups}


def _fused_kernel(kind: type) -> str | None:
    names = (f"_fused_{base.__name__.lower()}_" for base in kind.__mro__)
    return next((name for name in names if hasattr(torch, name)), None)


def _runs_on(kernel: str, device: torch.device) -> bool:
    # torch lists the devices with fused kernels, but not which kernels each device supports.
    if device.type == "meta":
        return False
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel}", key)


def _parameters(optimizer: Optimizer) -> chain[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def lay_out_states(optimizer: Optimizer) -> None:
    """Convert an optimizer's loaded states to the strides of their parameters.

    The states in a checkpoint have the memory format (such as channels_last) of the run that saved the checkpoint.
    """
    for param, states in optimizer.state.items():
        if is_sharded(param):
            continue
        for name, value in states.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                states[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)


def _join_momentum(optimizer: Optimizer) -> None:
    """Initialize the momentum of parameters that get their first gradient after others, such as unfrozen ones.

    torch's fused SGD supports only groups in which either all parameters have a momentum or none.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") or not group.get("momentum") or "dampening" not in group:
            continue
        if all(map(optimizer.state.__contains__, group["params"])):
            continue
        params = [param for param in group["params"] if param.grad is not None]
        new = [param for param in params if "momentum_buffer" not in optimizer.state.get(param, {})]
        if not 0 < len(new) < len(params):
            continue
        if group["dampening"]:  # the first step ignores dampening, so a zero buffer is not equivalent
            group["fused"] = optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        for param in () if group["dampening"] else new:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


class FusedLayouts:
    """Convert gradients and states to the strides of their parameters before each step with fused kernels.

    It also calls `_join_momentum`.

    Autograd creates gradients with these strides, and the optimizer creates its states with the same strides. The
    strides may differ if other code sets `p.grad`, loads a state, or changes the model's memory format between steps.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._strides: list[tuple[int, ...]] = []
        self._state: Any = None

    def __call__(self) -> None:
        """Convert gradients and states whose strides differ."""
        params = [p for group in self._optimizer.param_groups if group.get("fused") for p in group["params"]]
        if not params:
            return
        strides = list(map(Tensor.stride, params))
        # `Optimizer.load_state_dict` replaces the dict of states.
        if strides != self._strides or self._optimizer.state is not self._state:
            lay_out_states(self._optimizer)
            self._strides, self._state = strides, self._optimizer.state
        for param, stride in zip(params, strides, strict=True):
            grad = param.grad
            if grad is not None and grad.layout is not torch.strided:
                # Fused kernels do not support sparse gradients.
                for group in self._optimizer.param_groups:
                    group["fused"] = False
                self._optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
                return
            if grad is None or grad.stride() == stride:
                continue
            if not is_sharded(param):
                param.grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)
        _join_momentum(self._optimizer)
