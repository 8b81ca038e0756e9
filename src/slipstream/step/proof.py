"""Prove a compiled step before it is trusted: undo an eager step, and compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = [
    "NotCapturedError",
    "Snapshot",
    "WrongNumbersError",
    "compare",
    "evidence",
    "random_state",
    "seen_gradients",
]

_MOMENTS = ("momentum_buffer", "exp_avg", "square_avg", "sum", "prev")
"""State that follows the gradients, by torch's names."""
_NOISE = 0.01
"""Gradients below this share of the typical one (of a bias before BatchNorm, say) are rounding, and may differ."""
_LOST = 0.5
"""A tensor that is off by this share of its norm has lost a part of its gradient."""

Evidence = dict[str, list[tuple[str, Tensor]]]


class WrongNumbersError(SlipstreamError, RuntimeError):
    """A compiled step does not compute what an eager one does."""


class NotCapturedError(SlipstreamError, RuntimeError):
    """A step cannot stay one graph, although torch could capture it here and now."""


class Snapshot:
    """The state of a training before a step, kept in host memory, to go back to.

    Numbers that modules keep as attributes, which a forward may count up, belong to it, and so do the random numbers
    of Python and NumPy; torch's are the caller's affair.
    """

    def __init__(self, model: nn.Module, optim: OptimWrapper, others: Iterable[Tensor] = ()) -> None:
        self.optim = optim
        self.params = dict(model.named_parameters())
        tensors = {*self.params.values(), *model.buffers(), *optim.parameters(), *others}
        self._copies = {tensor: _kept(tensor) for tensor in tensors}
        self._grads = {
            p: None if p.grad is None else (p.grad, _kept(p.grad))
            for p in (*self.params.values(), *optim.parameters())
        }
        self._state = {
            param: {
                name: (value, _kept(value) if isinstance(value, Tensor) else value)
                for name, value in values.items()
            }
            for param, values in optim.optimizer.state.items()
        }
        self._counters = optim.progress
        self._capturable = [
            (group, group["capturable"]) for group in optim.param_groups if "capturable" in group
        ]
        self._numbers = [(vars(module), _numbers(module)) for module in model.modules()]
        self._drawn = random.getstate(), np.random.get_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place; state that the optimizer has made since then is dropped."""
        for place, copy in self._copies.items():
            place.copy_(copy)
        for param, kept in self._grads.items():
            param.grad = None if kept is None else kept[0].copy_(kept[1])
        state = self.optim.optimizer.state
        for made in [tensor for tensor in state if tensor not in self._state]:
            del state[made]
        for tensor, values in self._state.items():
            for name, (value, copy) in values.items():
                state[tensor][name] = value.copy_(copy) if isinstance(value, Tensor) else value
            for name in [name for name in state[tensor] if name not in values]:
                del state[tensor][name]
        self.optim.progress = self._counters
        for group, capturable in self._capturable:
            group["capturable"] = capturable
        for attributes, numbers in self._numbers:
            attributes.update(numbers)
        random.setstate(self._drawn[0])
        np.random.set_state(self._drawn[1])

    def before(self, tensor: Tensor) -> Tensor:
        """Return what the tensor held."""
        return self._copies[tensor]


def evidence(params: dict[str, nn.Parameter], optim: OptimWrapper, saved: Snapshot, ends: bool) -> Evidence:
    """Return copies of what shows the gradients of the step just made, by kind and parameter name.

    Those themselves within an accumulation window; after an optimizer step its moments, since the first steps of Adam
    hardly depend on how large a gradient is; without moments, and for SGD, how far the weights have moved.
    """
    if not ends:
        return {"gradient": [(name, _kept(p.grad)) for name, p in params.items() if p.grad is not None]}
    found: Evidence = {}
    state = optim.optimizer.state
    for name, param in params.items():
        for kind in _MOMENTS:
            if isinstance(value := state.get(param, {}).get(kind), Tensor) and value.shape == param.shape:
                found.setdefault(kind, []).append((name, _kept(value)))
    if not found or type(optim.optimizer) is SGD:
        found["step"] = [(name, _kept(param) - saved.before(param)) for name, param in params.items()]
    return found


def compare(expected: Evidence, found: Evidence, tolerance: float) -> tuple[bool, str]:
    """Return whether `expected` says anything, and how `found` contradicts it ('' if it does not).

    A compiler's defects lose whole gradients, or parts of them. Rounding does not: but where BatchNorm sees few
    values, it can move the gradient of single tensors by several percent. So all of a kind together may be off by
    `tolerance` of their norm, and a tensor by half of its own.
    """
    worst, message, says = 1.0, "", False
    for kind, entries in expected.items():
        off = 0.0
        others = dict(found.get(kind, ()))
        square = sum(float(value.double().square().sum()) for _, value in entries)
        typical = (square / max(sum(value.numel() for _, value in entries), 1)) ** 0.5
        says = says or 0 < square < float("inf")
        for name, value in entries:
            other = others.get(name)
            if not says:
                continue
            if other is None:
                return says, f"{kind} of '{name}' is missing"
            norm = float(value.double().norm())
            error = float((other.double() - value.double()).norm())
            allowed = max(_LOST, tolerance) * (norm + _NOISE * typical * value.numel() ** 0.5)
            off += error**2
            if not error <= worst * allowed:
                worst = error / allowed if allowed and error == error else float("inf")
                message = f"{kind} of '{name}': {error:.2e} off, of {norm:.2e}"
        if says and not message and not off <= tolerance**2 * square:
            message = f"{kind} of all parameters: {off**0.5:.2e} off, of {square**0.5:.2e}"
    return says, message


def random_state(device: torch.device) -> Callable[[], None]:
    """Return what puts torch's random numbers, on the host and on `device`, back to where they are now."""
    host = torch.get_rng_state()
    module = None if device.type == "cpu" else torch.get_device_module(device)
    own = None if module is None else module.get_rng_state(device)

    def put_back() -> None:
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(own, device)

    return put_back


@contextmanager
def seen_gradients(params: Iterable[nn.Parameter]) -> Iterator[set[nn.Parameter]]:
    """Collect the parameters that get a gradient inside the block."""
    seen: set[nn.Parameter] = set()
    handles = [p.register_post_accumulate_grad_hook(seen.add) for p in params if p.requires_grad]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float)}


def _kept(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, where there is room for it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
