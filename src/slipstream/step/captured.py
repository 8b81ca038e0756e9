"""What a compiled step is made of, and whether it still fits; and which batches are worth compiling it for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from slipstream.step.direct import DirectCalls, Outputs
from slipstream.step.leaves import leaves_of
from slipstream.step.numerics import LossScale, Scalar
from slipstream.step.update import GraphUpdate, can_trace, is_hooked
from slipstream.step.verification import NotCapturedError, UnstableGraphError

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.cuda_graph import RecordedCalls

__all__ = ["CapturedStep", "Shapes", "shapes"]

_GLOBAL_HOOKS = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)
_REQUIRES_GRAD = attrgetter("requires_grad")
_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_YOUNG = 2
"""A graph that served no more batches than this was not worth its compilation."""


class CapturedStep:
    """What the graphs of a step share, for as long as the same parameters are trained in the same groups.

    Args:
        model: the bare model.
        optim: holds the optimizer.
        params: the parameters that get a gradient.
        updates_inside: whether the optimizer may step in the graph.
    """

    run: Callable[..., Outputs]
    function: Callable[..., Outputs]
    """The step, not compiled."""
    direct: DirectCalls | None = None
    """Calls the compiled code, where Dynamo need not."""
    recorded: RecordedCalls | None = None
    """Replays direct calls as CUDA graphs."""
    said = False
    """Whether it was reported that calls are not replayed."""

    def __init__(
        self, model: nn.Module, optim: OptimWrapper, params: list[nn.Parameter], updates_inside: bool
    ) -> None:
        self.model, self.optim, self.params = model, optim, params
        device = params[0].device
        self.window = Scalar(1.0, device)
        self.scale = LossScale.of(optim, device)
        self.parts = list(optim.parts)
        inside = updates_inside and can_trace(optim.optimizer)
        self.update = GraphUpdate(optim.optimizer, params) if inside else None
        self.keeps_gradients = optim.accumulative_counts > 1 or self.update is None
        """Whether the graph reads and writes `p.grad`."""
        self.running: Any = None
        """The compiled code that was called last."""
        self.agreed: set[bool] = set()
        """The kinds of batches (whether they end a window) of which all processes have verified a graph."""
        self.kinds: set[tuple[Any, ...]] = set()
        """The kinds of batches (whether they end a window, their shapes) for which the background has compiled."""
        self.only_compiles = False
        """Whether compiled code is called to see that it is there, and must not run."""
        self._hooked = is_hooked(optim.optimizer)
        self._optimizer_step = type(optim.optimizer).step
        self._owned = list(optim.parameters())
        self._groups = list(optim.param_groups)
        self._seen = list(map(_REQUIRES_GRAD, self._owned))
        self._global_hooks = _global_hooks()
        self._batches = {True: 0, False: 0}
        self._graphs = {True: 0, False: 0}
        self._in_vain = 0

    def why_not(self) -> str | None:
        """Return what has changed, so that the graph no longer fits, or None; called at each step."""
        optim = self.optim
        if optim.parts != self.parts:
            return "the parts of the step"
        now = list(optim.parameters())
        if not (_are(optim.param_groups, self._groups) and _are(now, self._owned)):
            return "the parameter groups"
        # A graph is never made with hooks. Torch keeps and reuses the empty dict of a hook that was removed.
        if list(map(_REQUIRES_GRAD, self._owned)) != self._seen or any(map(any, map(_HOOKS, self._owned))):
            return "hooks or requires_grad of parameters"
        if _global_hooks() != self._global_hooks:
            return "the global hooks of modules"
        if (
            is_hooked(optim.optimizer) != self._hooked
            or type(optim.optimizer).step is not self._optimizer_step
        ):
            return "the hooks of the optimizer"
        if self.update is None:
            return None
        return self.update.refresh() or (None if self.update.keeps_state() else "the optimizer's state")

    def held(self) -> list[Tensor] | None:
        """Return the gradients of the window so far, as the graph changes them in place; None if it keeps none."""
        if not self.keeps_gradients:
            return None
        if self.optim.accumulative_counts == 1:
            return [torch.empty_like(param) for param in self.params]
        return [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]

    def count_batch(self, ends: bool) -> None:
        """Count a batch that the graph of its kind trains."""
        self._batches[ends] += 1

    def count_graph(self, ends: bool) -> None:
        """Count a graph that is about to be made.

        Raises:
            UnstableGraphError: the graphs before it served too few batches each.
        """
        if 0 < self._batches[ends] - 1 <= _YOUNG and self._graphs[ends]:
            self._in_vain += 1
        self._graphs[ends] += 1
        self._batches[ends] = 1
        if self._in_vain >= 3:
            raise UnstableGraphError(
                "each step needs another graph: something that a graph holds fixed changes"
            )

    @property
    def has_graphs(self) -> bool:
        """Whether a graph was made."""
        return any(self._graphs.values())

    def names(self) -> Mapping[int, str]:
        """Return names for the tensors of a step, by id."""
        names = {id(buffer): f"the buffer '{name}'" for name, buffer in self.model.named_buffers()}
        own: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}
        for param, values in self.optim.optimizer.state.items():
            for kind, value in values.items():
                names[id(value)] = f"{kind} of '{own.get(param, 'a parameter')}'"
        names.update({id(param): f"the weight '{name}'" for param, name in own.items()})
        for part in self.parts:
            names.update({id(tensor): name for name, tensor in part.state().items()})
        return names

    def updated(self) -> set[int]:
        """Return the ids of the tensors that an update changes, apart from gradients."""
        state = (value for values in self.optim.optimizer.state.values() for value in values.values())
        return {
            id(tensor) for tensor in (*self.params, *state) if isinstance(tensor, Tensor) and tensor.numel()
        }

    def after_graph(self) -> set[int]:
        """Return the ids of the tensors that change after a graph without update: they are none of its results."""
        followers = (tensor for part in self.parts for tensor in part.state().values())
        return {id(tensor) for tensor in (*self._owned, *followers)}

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the step that are neither the model's nor the user's to replace."""
        yield self.window.tensor
        if self.scale is not None:
            yield from self.scale.state
        if self.update is not None:  # `why_not` notices a state tensor that is replaced
            yield from self.update.tensors()
        for part in self.parts:
            yield from part.state().values()
            for value in vars(part).values():
                if isinstance(value, Scalar):
                    yield value.tensor

    def check_params(self) -> None:
        """Refuse parameters for whose values torch takes Python numbers.

        Raises:
            NotCapturedError: one has no dimension, is float64 and lies on the CPU.
        """
        if any(p.ndim == 0 and p.dtype == torch.float64 and p.device.type == "cpu" for p in self.params):
            raise NotCapturedError("a float64 parameter has no dimension: give it the shape (1,)")

    def check_hooks(self) -> None:
        """Refuse hooks that only the autograd engine calls.

        Raises:
            NotCapturedError: the first of them.
        """
        own = {param: name for name, param in self.model.named_parameters()}
        for param in self._owned:
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                raise NotCapturedError(
                    f"the parameter '{own.get(param, '?')}' has a hook, which only backward() calls: remove it, or "
                    "change gradients in a part of the step"
                )
        if modules._global_backward_hooks or modules._global_backward_pre_hooks:
            raise NotCapturedError("torch has a global backward hook of modules, which only backward() calls")
        for name, module in self.model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise NotCapturedError(
                    f"the module '{name}' has a backward hook, which only backward() calls"
                )


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Say whether both hold the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _global_hooks() -> list[tuple[int, ...]]:
    """Return the keys of the hooks that torch calls for every module."""
    return [tuple(hooks) for hooks in _GLOBAL_HOOKS]


def shapes(inputs: Any) -> list[torch.Size]:
    """Return the shapes of the tensors of a batch."""
    tensors = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
    try:
        return [tensor.shape for tensor in tensors]
    except RuntimeError:  # a nested tensor has none
        return [torch.Size() if tensor.is_nested else tensor.shape for tensor in tensors]


class Shapes:
    """Decides which batches are worth a graph: those of the first shape, and others once they are many."""

    def __init__(self) -> None:
        self._first: list[torch.Size] | None = None
        self._steps = self._others = 0
        self.varies = False
        """Whether the last batch had another shape than the first."""

    def worth_a_graph(self, inputs: Any) -> bool:
        """Count a batch; say whether a graph should train on it."""
        now = shapes(inputs)
        if self._first is None:
            self._first = now
        self._steps += 1
        self.varies = now != self._first
        if not self.varies:
            return True
        self._others += 1
        return self._others >= 8 and self._others * 8 >= self._steps
