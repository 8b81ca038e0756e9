"""State shared by a step's graphs, checks of their validity, and the selection of batches that use a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from slipstream.step.direct import DirectCalls
from slipstream.step.function import Outputs
from slipstream.step.leaves import leaves_of
from slipstream.step.numerics import HostNumber
from slipstream.step.update import GraphUpdate, can_trace, is_hooked
from slipstream.step.verification import NotCapturedError, OnlyEagerError, UnstableGraphError

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.cuda_graph import CapturedCalls

__all__ = ["CapturedStep", "Shapes", "check_batch"]

_GLOBAL_HOOKS = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)
_REQUIRES_GRAD = attrgetter("requires_grad")
_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_FEW_BATCHES = 2
"""A graph that is used for at most this many batches is not worth compiling."""


class CapturedStep:
    """The state shared by a step's graphs. It is valid as long as the trained parameters and their groups do not
    change.

    Args:
        model: the unwrapped model.
        optim: the optimizer wrapper.
        params: the parameters that receive a gradient.
        allow_update_inside: whether the graph may contain the optimizer step.
    """

    run: Callable[..., Outputs]
    function: Callable[..., Outputs]
    """The uncompiled step."""
    direct: DirectCalls | None = None
    """Calls the compiled code without Dynamo, if possible."""
    cuda_graphs: CapturedCalls | None = None
    """Replays direct calls as CUDA graphs."""
    has_graphs = False
    """Whether a graph was captured; its compilation may have failed."""

    def __init__(
        self,
        model: nn.Module,
        optim: OptimWrapper,
        params: list[nn.Parameter],
        allow_update_inside: bool,
    ) -> None:
        self.model, self.optim, self.params = model, optim, params
        device = params[0].device
        self.window = HostNumber(1.0, device)
        self.scale = optim.loss_scale
        self.parts = list(optim.parts)
        contains_update = allow_update_inside and can_trace(optim.optimizer)
        self.update = GraphUpdate(optim.optimizer, params) if contains_update else None
        self.adds_gradients = optim.accumulative_counts > 1 or optim.overrides_zero_grad
        """Whether the graph adds the gradients of a batch to `p.grad`."""
        self.keeps_gradients = self.adds_gradients or self.update is None
        """Whether the graph reads and writes `p.grad`."""
        self.last_compiled: Any = None
        """The compiled code of the last call."""
        self.verified: set[bool] = set()
        """Kinds of batches whose graph is verified on all ranks. The kind is True for the last batch of an accumulation
        window, and False for all other batches."""
        self.uses: Counter[bool] = Counter()
        """Number of batches since the last graph of each kind was captured."""
        self._wasted = 0
        self._hooked = is_hooked(optim.optimizer)
        self._owned = list(optim.parameters())
        self._groups = list(optim.param_groups)
        self._requires_grad = list(map(_REQUIRES_GRAD, self._owned))
        self._global_hooks = _global_hooks()

    def find_change(self) -> str | None:
        """Return a description of a change that invalidates the graph, or None. This method runs at every step."""
        optim = self.optim
        if optim.parts != self.parts:
            return "the step parts"
        current = list(optim.parameters())
        if not (_same_objects(optim.param_groups, self._groups) and _same_objects(current, self._owned)):
            return "the parameter groups"
        # A graph is captured only if no parameter has a hook, so any hook is a change. Removing a hook leaves an
        # empty dict.
        if list(map(_REQUIRES_GRAD, self._owned)) != self._requires_grad or any(
            map(any, map(_HOOKS, self._owned))
        ):
            return "a parameter's hooks or requires_grad"
        if _global_hooks() != self._global_hooks:
            return "the global module hooks"
        if self.scale is not None and self.scale.is_changed():
            return "the loss scale settings"
        if is_hooked(optim.optimizer) != self._hooked:
            return "the optimizer hooks"
        if self.update is None:
            return None
        return self.update.refresh() or (None if self.update.keeps_state() else "the optimizer's state")

    def grad_buffers(self) -> list[Tensor] | None:
        """Return the tensors in which the graph stores gradients, or None if the graph does not use `p.grad`."""
        if not self.keeps_gradients:
            return None
        if not self.adds_gradients:
            return [torch.empty_like(param) for param in self.params]
        return [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]

    def count_graph(self, ends_window: bool) -> None:
        """Count a graph before it is compiled.

        Raises:
            UnstableGraphError: too many of the previous graphs were used for only a few batches.
        """
        self._wasted += 0 < self.uses[ends_window] - 1 <= _FEW_BATCHES
        self.uses[ends_window], self.has_graphs = 1, True
        if self._wasted >= 3:
            raise UnstableGraphError(
                "each step needs a new graph, because a value that is a constant in the graph changes, or because "
                "torch.compiler.reset() is called; store the value in a tensor, or remove the call"
            )

    def names(self) -> Mapping[int, str]:
        """Return descriptive names for the step's tensors, keyed by tensor id."""
        names = {id(buffer): f"the buffer '{name}'" for name, buffer in self.model.named_buffers()}
        params: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}
        for param, values in self.optim.optimizer.state.items():
            for kind, value in values.items():
                names[id(value)] = f"{kind} of '{params.get(param, 'a parameter')}'"
        names.update({id(param): f"the weight '{name}'" for param, name in params.items()})
        for part in self.parts:
            names.update({id(tensor): name for name, tensor in part.state().items()})
        return names

    def unread_tensors(self, inputs: Sequence[Any]) -> list[tuple[str, Tensor, int]]:
        """Return the name, tensor and version of each buffer that is not an input of the graph.

        If the graph contains the update, the result includes the optimizer's state.
        """
        known, names = set(map(id, inputs)), self.names()
        tensors = list(self.model.buffers())
        if self.update is not None:
            tensors += [t for values in self.optim.optimizer.state.values() for t in values.values()]
        return [
            (names.get(id(tensor), "a tensor"), tensor, tensor._version)
            for tensor in tensors
            if isinstance(tensor, Tensor) and id(tensor) not in known
        ]

    def updated_ids(self) -> set[int]:
        """Return the ids of the tensors that an update changes, except gradients."""
        state = (value for values in self.optim.optimizer.state.values() for value in values.values())
        return {
            id(tensor) for tensor in (*self.params, *state) if isinstance(tensor, Tensor) and tensor.numel()
        }

    def ids_changed_later(self) -> set[int]:
        """Return the ids of the tensors that change after the graph runs, if the graph does not contain the update."""
        averages = (tensor for part in self.parts for tensor in part.state().values())
        return {id(tensor) for tensor in (*self._owned, *averages)}

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the step owns, which neither the model nor the user replaces."""
        yield self.window.tensor
        if self.scale is not None:
            yield from self.scale.state
        if self.update is not None:  # `find_change` detects replaced state tensors
            yield from self.update.tensors()
        for part in self.parts:
            yield from part.state().values()
            for value in vars(part).values():
                if isinstance(value, HostNumber):
                    yield value.tensor

    def check_hooks(self) -> None:
        """Check for hooks that are called only by `backward()`.

        Raises:
            NotCapturedError: a parameter or module has such a hook, or a parameter would become a Python number.
        """
        params = {param: name for name, param in self.model.named_parameters()}
        for param, name in params.items():
            if param.ndim == 0 and param.dtype == torch.float64 and param.device.type == "cpu":
                raise NotCapturedError(
                    f"the float64 parameter '{name}' is a 0-dim tensor; give it shape (1,)"
                )
        hooked = [
            f"the parameter '{params.get(param, '?')}'"
            for param in self._owned
            if param._backward_hooks or param._post_accumulate_grad_hooks
        ]
        hooked += [
            f"the module '{name}'"
            for name, module in self.model.named_modules()
            if module._backward_hooks or module._backward_pre_hooks
        ]
        if modules._global_backward_hooks or modules._global_backward_pre_hooks:
            hooked.append("every module")
        if hooked:
            raise NotCapturedError(
                f"{hooked[0]} has a backward hook, which is called only by backward(); remove the hook, or modify the "
                "gradients in a StepPart"
            )


def _same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both sequences contain the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _global_hooks() -> list[tuple[int, ...]]:
    """Return the keys of the hooks that torch calls for every module."""
    return [tuple(hooks) for hooks in _GLOBAL_HOOKS]


def _shapes(inputs: Any) -> list[torch.Size]:
    """Return the shapes of a batch's tensors."""
    tensors = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
    try:
        return [tensor.shape for tensor in tensors]
    except RuntimeError:  # raised for a nested tensor, which has no shape
        return [torch.Size() if tensor.is_nested else tensor.shape for tensor in tensors]


def check_batch(inputs: Any) -> None:
    """Check for tensors that the compiled step does not support.

    Raises:
        OnlyEagerError: the batch contains a tensor subclass, a nested tensor, or a tensor that requires grad.
    """
    for leaf in leaves_of(inputs):
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) not in (Tensor, nn.Parameter) or leaf.is_nested or leaf.requires_grad:
            raise OnlyEagerError(
                f"the batch contains a tensor that a compiled step does not support ({type(leaf).__name__}, nested: "
                f"{leaf.is_nested}, requires grad: {leaf.requires_grad}); convert it to a regular tensor, and detach it"
            )


class Shapes:
    """Selects batches that use a graph: those with the first batch's shapes, and other batches if they are frequent."""

    def __init__(self) -> None:
        self._first: list[torch.Size] | None = None
        self._steps = self._others = 0
        self.varies = False
        """Whether the shapes of the latest batch differ from those of the first batch."""

    def should_use_graph(self, inputs: Any) -> bool:
        """Count a batch, and return whether it should use a graph."""
        current = _shapes(inputs)
        if self._first is None:
            self._first = current
        self._steps += 1
        self.varies = current != self._first
        if not self.varies:
            return True
        self._others += 1
        return self._others >= 8 and self._others * 8 >= self._steps
