"""Memory formats of gradients and optimizer states.

torch's fused optimizers read parameters, gradients and states as flat arrays, so different strides silently produce
wrong results.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from slipstream.sharding import is_sharded

__all__ = ["FusedLayouts", "lay_out_states"]


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


class FusedLayouts:
    """Convert gradients and states to the strides of their parameters before each step with fused kernels.

    Autograd creates gradients with these strides, and the optimizer creates its states with the same strides. The
    strides may differ if other code sets `p.grad`, loads or replaces states, or changes the model's memory format
    between steps. The check for replaced states covers only parameters with four or more dimensions, because memory
    formats apply only to these. A step pre-hook can also set `p.grad`. Therefore, if the optimizer has step
    pre-hooks, the gradients are converted again after the last hook.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._strides: list[tuple[int, ...]] = []
        self._states: Any = None
        self._dicts: list[Any] = []
        self._watched: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._handle: RemovableHandle | None = None

    def __call__(self) -> None:
        """Convert gradients and states whose strides differ."""
        groups = [group for group in self._optimizer.param_groups if group.get("fused")]
        self._register_after_others(bool(groups))
        if groups:
            self._convert(groups)

    def _register_after_others(self, fused: bool) -> None:
        """Make `_after_hooks` the last step pre-hook, or remove it if no group is fused or there are no other hooks."""
        hooks = getattr(self._optimizer, "_optimizer_step_pre_hooks", {})
        own = None if self._handle is None else self._handle.id
        others = bool(_global_optimizer_pre_hooks) or any(hook_id != own for hook_id in hooks)
        if fused and others and own is not None and own == next(reversed(hooks), None):
            return
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if fused and others:
            self._handle = self._optimizer.register_step_pre_hook(self._after_hooks)

    def _after_hooks(self, *_: Any) -> None:
        self._convert([group for group in self._optimizer.param_groups if group.get("fused")])

    def _convert(self, groups: list[dict[str, Any]]) -> None:
        params = [param for group in groups for param in group["params"]]
        strides = list(map(Tensor.stride, params))
        if strides != self._strides or self._states_replaced():
            lay_out_states(self._optimizer)
            self._strides = strides
            self._record_states()
        for param, stride in zip(params, strides, strict=True):
            grad = param.grad
            if grad is None or grad.layout is not torch.strided or grad.stride() == stride:
                continue
            if not is_sharded(param):
                param.grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)

    def _states_replaced(self) -> bool:
        """Return whether states were added or replaced. The loops run in C, because this method runs in every step."""
        state = self._optimizer.state
        if state is not self._states:  # `Optimizer.load_state_dict` replaces the dict
            return True
        values = chain.from_iterable(map(dict.values, self._watched))
        return not (
            all(map(is_, chain(state.values(), _SENTINEL), self._dicts))
            and all(map(is_, chain(values, _SENTINEL), self._values))
        )

    def _record_states(self) -> None:
        state = self._optimizer.state
        self._states, self._dicts = state, [*state.values(), *_SENTINEL]
        self._watched = [states for param, states in state.items() if param.dim() >= 4]
        self._values = [*chain.from_iterable(map(dict.values, self._watched)), *_SENTINEL]


_SENTINEL = (object(),)
"""Appended to both sequences in a comparison, so that sequences of different lengths compare unequal."""
