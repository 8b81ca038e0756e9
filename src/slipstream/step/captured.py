"""State shared by a step's graphs, checks of their validity, and calls to their code without Dynamo.

On each call, Dynamo evaluates the guards of a captured function, collects the inputs of the graph from their sources,
calls the compiled code and assembles the outputs. The inputs of a captured step are the batch, the accumulated
gradients, and tensors that are never replaced, such as parameters. `DirectCalls` collects the tensors in the last group
only once. It evaluates Dynamo's guards at every step, so all values that the graph treats as constants are still
checked.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from slipstream.step.function import GradBuffers, Outputs
from slipstream.step.leaves import flatten, leaves_of
from slipstream.step.numerics import HostNumber, precise_dtype
from slipstream.step.update import GraphUpdate, can_trace, is_hooked
from slipstream.step.verification import (
    GraphCode,
    NotCapturedError,
    OnlyEagerError,
    UnstableGraphError,
    Verification,
    VerificationNeeded,
)

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.cuda_graph import CudaGraphs

__all__ = ["Arguments", "Capture", "DirectCalls", "Shapes", "check_batch"]

_GLOBAL_HOOKS = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)
_REQUIRES_GRAD = attrgetter("requires_grad")
_PARAMS = itemgetter("params")
_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_FEW_BATCHES = 2  # a graph that is used for at most this many batches is not worth compiling
_VALUES = methodcaller("values")

# The arguments of a step: the inputs, the accumulated gradients, and whether the batch ends a window.
Arguments = tuple[Any, GradBuffers, bool]


class Capture:
    """The state shared by a step's graphs. It is valid as long as the trained parameters and their groups do not
    change.

    Args:
        model: the unwrapped model.
        optim: the optimizer wrapper.
        params: the parameters that receive a gradient.
        allow_update_inside: whether the graph may contain the optimizer step.

    Attributes:
        step: the function that Dynamo captures.
        run: runs the compiled step.
        uncompiled: runs the step with torch's kernels.
        direct: calls the compiled code without Dynamo, if possible.
        cuda_graphs: replays direct calls as CUDA graphs.
        has_graphs: whether a graph was captured; its compilation may have failed.
        adds_gradients: whether the graph adds the gradients of a batch to `p.grad`.
        keeps_gradients: whether the graph reads and writes `p.grad`.
        last_code: the compiled code of the last call.
        verified: kinds of batches whose graph is verified on all ranks. The kind is True for the last batch of an
            accumulation window, and False for all other batches.
        accepted: the code that has computed the numbers of the eager step.
        uses: number of batches since the last graph of each kind was captured.
    """

    step: Callable[..., Outputs]
    run: Callable[..., Outputs]
    uncompiled: Callable[..., Outputs]
    direct: DirectCalls
    cuda_graphs: CudaGraphs | None
    has_graphs = False

    def __init__(
        self, model: nn.Module, optim: OptimWrapper, params: list[nn.Parameter], allow_update_inside: bool
    ) -> None:
        self.model, self.optim, self.params = model, optim, params
        device = params[0].device
        self.window = HostNumber(1.0, device)
        self.scale = optim.loss_scale
        self.parts = list(optim.parts)
        for part in self.parts:
            if part.max_norm is not None:
                part.limit = HostNumber(part.max_norm, device, precise_dtype(device))
        contains_update = allow_update_inside and can_trace(optim.optimizer)
        self.update = GraphUpdate(optim.optimizer, params) if contains_update else None
        self.adds_gradients = optim.accumulative_counts > 1 or optim.overrides_zero_grad
        self.keeps_gradients = self.adds_gradients or self.update is None
        self.last_code: Any = None
        self.verified: set[bool] = set()
        self.accepted: set[GraphCode] = set()
        self.uses: Counter[bool] = Counter()
        self._wasted = 0
        self._hooked = is_hooked(optim.optimizer)
        self._owned = list(optim.parameters())
        self._groups = list(optim.param_groups)
        self._requires_grad = list(map(_REQUIRES_GRAD, self._owned))
        self._global_hooks = list(map(tuple, _GLOBAL_HOOKS))

    def find_change(self) -> str | None:
        """Return a description of a change that invalidates the graph, or None. This method runs at every step."""
        optim, optimizer = self.optim, self.optim.optimizer
        if optim.parts != self.parts:
            return "the step parts"
        if optim.accumulation.counts > 1 and not self.adds_gradients:
            return "the number of accumulated batches"
        groups = optimizer.param_groups
        owned = list(chain.from_iterable(map(_PARAMS, groups)))
        if not (_same(groups, self._groups) and _same(owned, self._owned)):
            return "the parameter groups"
        # A graph is captured only if no parameter has a hook, so any hook is a change. Removing a hook leaves an
        # empty dict.
        if list(map(_REQUIRES_GRAD, owned)) != self._requires_grad or any(map(any, map(_HOOKS, owned))):
            return "a parameter's hooks or requires_grad"
        if list(map(tuple, _GLOBAL_HOOKS)) != self._global_hooks:
            return "the global module hooks"
        if is_hooked(optimizer) != self._hooked:
            return "the optimizer hooks"
        return None if self.update is None else self.update.find_change()

    def grad_buffers(self) -> list[Tensor]:
        """Return the tensors in which the graph stores gradients, if `keeps_gradients` is set."""
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

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that a step may change, except gradients, with descriptive names."""
        params: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}
        named = [(f"the buffer '{name}'", buffer) for name, buffer in self.model.named_buffers()]
        for param, values in self.optim.optimizer.state.items():
            owner = params.get(param, "a parameter")
            named += [(f"{kind} of '{owner}'", t) for kind, t in values.items() if isinstance(t, Tensor)]
        named += [(f"the weight '{name}'", param) for param, name in params.items()]
        return named + [item for part in self.parts for item in part.state().items()]

    def unread_tensors(self, inputs: Sequence[Any]) -> list[tuple[str, Tensor, int]]:
        """Return the name, tensor and version of each tensor that a step may change, but the graph does not."""
        known = set(map(id, inputs))
        return [(name, t, t._version) for name, t in self.named_tensors() if id(t) not in known]

    def updated(self) -> list[Tensor]:
        """Return the tensors that the update in the graph changes, except gradients."""
        return [*self.params, *(() if self.update is None else self.update.state)]

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the step owns, which neither the model nor the user replaces."""
        yield from (self.window.tensor, *(() if self.optim.objects is None else [self.optim.objects]))
        if self.scale is not None:
            yield from self.scale.state
        if self.update is not None:  # `find_change` detects replaced state tensors
            yield from self.update.tensors()
        for part in self.parts:
            yield from part.state().values()
            for value in vars(part).values():
                if isinstance(value, HostNumber):
                    yield value.tensor

    def start_verification(self, needed: VerificationNeeded, ends_window: bool) -> Verification:
        """Return the results of a graph, before the eager step trains on the batch.

        Raises:
            WrongNumbersError: an update with a loss or gradients that are not finite is not skipped.
            Exception: any exception that the compiled code raises.
        """
        device = self.params[0].device
        names = {id(tensor): name for name, tensor in self.named_tensors()}

        @contextmanager
        def context() -> Iterator[None]:
            devices = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(devices, device_type=device.type), torch.enable_grad():
                yield

        named = [names.get(id(value), "an input") for value in needed.inputs]
        verification = Verification(needed.code.graph, needed.code.run, needed.inputs, named, context)
        flags = [part.nonfinite for part in self.parts if part.nonfinite is not None]
        poisoned = flags if self.scale is None else [self.scale.scale]
        if self.update is not None and ends_window and poisoned:
            verification.check_skipped(set(map(id, self.updated())), set(map(id, poisoned)))
        limits = [part.limit.tensor for part in self.parts if part.limit is not None]
        for limit in [value for value in needed.inputs if any(value is each for each in limits)]:
            for factor in (1e-6, 1e6):  # so that clipping is active and inactive
                inputs = [value * factor if value is limit else value for value in needed.inputs]
                code = needed.code
                Verification(code.graph, code.run, inputs, named, context).check_compiled()
        return verification

    def check_inputs(self, inputs: Sequence[Any]) -> None:
        """Check that the step differentiates only with respect to parameters.

        Raises:
            OnlyEagerError: another input of a graph requires grad, for example a tensor in the batch.
        """
        owned = set(map(id, self._owned))
        for value in inputs:
            is_other = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if is_other and value.requires_grad and id(value) not in owned:
                raise OnlyEagerError(
                    f"a tensor of shape {tuple(value.shape)} requires grad, but is not a parameter; detach it"
                )

    def check_hooks(self) -> None:
        """Check for hooks that are called only by `backward()`.

        Raises:
            NotCapturedError: a parameter or module has such a hook, or a parameter would become a Python number.
        """
        params: dict[Tensor, str] = dict.fromkeys(self._owned, "?")
        params |= {param: name for name, param in self.model.named_parameters()}
        states = {tensor: name for part in self.parts for name, tensor in part.state().items()}
        for tensor, name in (params | states).items():
            if tensor.ndim == 0 and tensor.dtype == torch.float64 and tensor.device.type == "cpu":
                raise NotCapturedError(f"the float64 tensor '{name}' is a 0-dim tensor; give it shape (1,)")
        hooked = [f"the parameter '{params[param]}'" for param in self._owned if any(_HOOKS(param))]
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


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def check_batch(inputs: Any) -> None:
    """Check for tensors that the compiled step does not support.

    Raises:
        OnlyEagerError: the batch contains a tensor subclass or a nested tensor.
    """
    for leaf in leaves_of(inputs):
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) not in (Tensor, nn.Parameter) or leaf.is_nested:
            raise OnlyEagerError(
                f"the batch contains a tensor that a compiled step does not support ({type(leaf).__name__}, nested: "
                f"{leaf.is_nested}); convert it to a regular tensor"
            )


class Shapes:
    """Selects batches that use a graph: those with the first batch's shapes, and other batches if they are frequent.

    Attributes:
        varies: whether the shapes of the latest batch differ from those of the first batch.
        failed: whether a graph for other shapes than those of the first batch has failed.
    """

    def __init__(self) -> None:
        self._first: list[torch.Size] | None = None
        self._steps = self._others = 0
        self.varies = self.failed = False

    def should_use_graph(self, leaves: Sequence[Any]) -> bool:
        """Count a batch with these leaves, and return whether it should use a graph."""
        # A nested tensor has no shape.
        current = [t.shape for t in leaves if isinstance(t, Tensor) and not t.is_nested]
        if self._first is None:
            self._first = current
        self._steps += 1
        self.varies = current != self._first
        if not self.varies:
            return True
        self._others += 1
        return self._others >= 8 and self._others * 8 >= self._steps


# ---- calls without Dynamo --------------------------------------------------------------------------------


class DirectCalls:
    """Calls the compiled code of each graph without Dynamo, except on the first call.

    Args:
        function: the step that Dynamo compiles, `function(inputs, grad_buffers, ends_window)`.
        model: the model; the step may read its parameters and buffers.
        others: additional tensors that the step may read, and that are never replaced.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module, others: Iterable[Tensor]) -> None:
        self._code = function.__code__
        self._locals = dict(inspect.getclosurevars(function).nonlocals)
        modules = list(model.modules())
        self._tensor_dicts = [*(m._parameters for m in modules), *(m._buffers for m in modules)]
        self._known_tensors = list(chain.from_iterable(map(_VALUES, self._tensor_dicts)))
        self._others = {id(tensor) for tensor in others}
        self._calls: list[_Call] = []
        self._guards: list[Any] = []  # of all code that Dynamo has compiled

    def find(self, arguments: Arguments, leaves: Sequence[Any], structure: Any) -> _Call | None:
        """Return the call whose guards accept these arguments of the step, or None if there is no such call.

        Args:
            arguments: the arguments of the step function.
            leaves: the leaves of the inputs, followed by the accumulated gradients.
            structure: the structure of the inputs.
        """
        if not self._calls:
            return None
        current = list(chain.from_iterable(map(_VALUES, self._tensor_dicts)))
        if not _same(current, self._known_tensors):
            # Discard all calls, so that the next call uses Dynamo.
            self._known_tensors, self._calls = current, []
            return None
        values = self._locals
        values["inputs"], values["grad_buffers"], values["ends_window"] = arguments
        try:
            for call in self._calls:
                # The guards do not check the order of keys, values that the step does not read, or attributes that it
                # sets.
                if (
                    call.structure == structure
                    and call.code.guards.check(values)
                    and all(owner.get(name, call) is value for owner, name, value in call.code.effects or ())
                    and all(leaves[i] is leaves[j] for i, j in call.shared)
                ):
                    return call
            return None
        finally:
            values["inputs"] = values["grad_buffers"] = None

    def store_guards(self, code: GraphCode) -> None:
        """Set `code.guards` to the guards of the code that Dynamo compiled most recently."""
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(self._code)
        new = [entry.guard_manager for entry in entries if entry.guard_manager not in self._guards]
        self._guards += new
        if len(new) == 1:
            code.guards = new[0]

    def add_call(self, code: GraphCode, arguments: Arguments, outputs: Outputs) -> _Call | None:
        """Add and return a direct call to the code that Dynamo called; return None if a direct call is not possible.

        A direct call is possible if each tensor that the code reads is an argument or is never replaced, and each
        output of the step is a result of the code.

        Args:
            code: the code that Dynamo called.
            arguments: the arguments of the step function.
            outputs: the return value of the step function.
        """
        self.store_guards(code)
        last, code.last = code.last, None
        if code.guards is None or last is None or code.effects is None:
            return None
        (inputs, results), (logs, finite) = last, outputs
        tensors, structure = flatten(arguments[0])
        leaves = list(enumerate((*tensors, *(arguments[1] or ()))))
        known = {id(tensor) for tensor in self._known_tensors} | self._others
        # A `known` tensor in the batch is not treated as variable, because the guards check it if the step reads it
        # from the batch.
        variable = {id(leaf): i for i, leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in known}
        index: dict[int, Any] = {id(value): i for i, value in enumerate(results)} | {id(None): None}
        used = set(map(id, inputs))
        if not used <= variable.keys() | known or not set(map(id, (*logs.values(), finite))) <= index.keys():
            return None
        call = _Call(
            code,
            structure,
            fixed=[None if id(value) in variable else value for value in inputs],
            positions=[(i, variable[id(value)]) for i, value in enumerate(inputs) if id(value) in variable],
            shared=[
                (i, j) for i, leaf in leaves if id(leaf) in used and (j := variable.get(id(leaf), i)) != i
            ],
            logs={name: index[id(value)] for name, value in logs.items()},
            finite=index[id(finite)],
            one_device=len({value.device for value in inputs if isinstance(value, Tensor)}) == 1,
        )
        # Among calls that require shared tensors, keep only the latest, because batches may share tensors in many ways.
        self._calls = [k for k in self._calls if k.code is not code or not k.shared]
        self._calls.append(call)
        return call


@dataclass(frozen=True, eq=False)
class _Call:
    """A direct call to the compiled code of a graph, with the positions of inputs and outputs.

    Attributes:
        shared: pairs of argument positions that must contain the same tensor, because the code may read either
            position. The guards do not check tensors that the step does not read.
        one_device: whether all inputs are on one device. Otherwise, the call is not replayed, because replaying a CUDA
            graph does not read the current values of host tensors.
    """

    code: GraphCode
    structure: Any
    fixed: list[Any]
    positions: list[tuple[int, int]]
    shared: list[tuple[int, int]]
    logs: dict[str, int]
    finite: int | None
    one_device: bool

    def run(self, tensors: Sequence[Tensor]) -> Outputs:
        """Run the code with the argument tensors that it reads, in the order of `positions`."""
        inputs = self.fixed.copy()
        for (position, _), tensor in zip(self.positions, tensors, strict=True):
            inputs[position] = tensor
        results = self.code.run(*inputs)
        logs = {name: results[i] for name, i in self.logs.items()}
        return logs, None if self.finite is None else results[self.finite]
