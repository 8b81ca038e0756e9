"""Call the compiled code of a step without Dynamo's frame evaluation.

On each call, Dynamo evaluates the guards of a captured function, collects the inputs of the graph from their sources,
calls the compiled code and assembles the outputs. The inputs of a captured step are the batch, the accumulated
gradients, and tensors that are never replaced, such as parameters. This module collects the tensors in the last group
only once. It evaluates Dynamo's guards at every step, so all values that the graph treats as constants are still
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.step.function import Outputs
from slipstream.step.leaves import leaves_of, structure_of
from slipstream.step.verification import CompiledGraph

__all__ = ["DirectCalls"]

_Arguments = tuple[Any, Any, bool]
_VALUES = methodcaller("values")


class DirectCalls:
    """Calls the compiled code of each graph without Dynamo, except on the first call.

    Args:
        function: the step that Dynamo compiles, `function(inputs, grad_buffers, ends_window)`.
        model: the model; the step may read its parameters and buffers.
        others: additional tensors that the step may read, and that are never replaced.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module, others: Iterable[Tensor]) -> None:
        self._code = function.__code__
        cells = function.__closure__ or ()
        free = zip(function.__code__.co_freevars, cells, strict=True)
        self._locals: dict[str, Any] = {name: cell.cell_contents for name, cell in free}
        modules = list(model.modules())
        self._tensor_dicts = [*(m._parameters for m in modules), *(m._buffers for m in modules)]
        self._known_tensors = self._tensors()
        self._others = {id(tensor) for tensor in others}
        self._calls: list[_Call] = []
        self._seen: list[Any] = []

    def _tensors(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, self._tensor_dicts)))

    def find(self, inputs: Any, grad_buffers: Sequence[Tensor] | None, ends_window: bool) -> _Call | None:
        """Return the call whose guards accept these arguments, or None if there is no such call."""
        if not self._calls:
            return None
        current = self._tensors()
        if len(current) != len(self._known_tensors) or not all(map(is_, current, self._known_tensors)):
            self._known_tensors, self._calls = (
                current,
                [],
            )  # discard all calls, so that the next call uses Dynamo
            return None
        values = self._locals
        values["inputs"], values["grad_buffers"], values["ends_window"] = inputs, grad_buffers, ends_window
        try:
            structure = structure_of(inputs)
            for call in self._calls:
                # The guards do not check the order of keys, or values that the step does not read.
                if (
                    call.structure == structure
                    and call.check(values)
                    and call.shares_tensors(inputs, grad_buffers)
                ):
                    return call
            return None
        finally:
            values["inputs"] = values["grad_buffers"] = None

    def store_guards(self, compiled: CompiledGraph) -> None:
        """Set `compiled.guards` to the guards of the code that Dynamo compiled most recently."""
        entries = _entries(self._code)
        new = [entry for entry in entries if not any(entry is seen for seen in self._seen)]
        self._seen += new
        if len(new) == 1:
            compiled.guards = new[0].guard_manager

    def add_call(self, compiled: CompiledGraph, arguments: _Arguments, outputs: Outputs) -> _Call | None:
        """Add and return a direct call to the code that Dynamo called; return None if a direct call is not possible.

        Args:
            compiled: the code that Dynamo called.
            arguments: the arguments of the step function.
            outputs: the return value of the step function.
        """
        self.store_guards(compiled)
        last, compiled.last = compiled.last, None
        if compiled.guards is None or last is None or compiled.has_side_effects:
            return None
        fixed = {id(tensor) for tensor in self._known_tensors} | self._others
        call = _Call.of(compiled.guards, compiled, last, arguments, outputs, fixed)
        if call is not None:
            # Among calls that require shared tensors, keep only the latest, because batches may share tensors in many
            # ways.
            self._calls = [k for k in self._calls if k.compiled is not compiled or not k.shared]
            self._calls.append(call)
        return call


@dataclass(frozen=True, eq=False)
class _Call:
    """A direct call to the compiled code of a graph, with the guards and the positions of inputs and outputs."""

    check: Callable[[dict[str, Any]], bool]
    structure: Any
    compiled: CompiledGraph
    fixed: list[Any]
    positions: list[tuple[int, int]]
    shared: list[tuple[int, int]]
    """Pairs of argument positions that must contain the same tensor, because the code may read either position. The
    guards do not check tensors that the step does not read."""
    logs: dict[str, int]
    finite: int | None
    one_device: bool
    """Whether all inputs are on one device. Otherwise, the call is not replayed, because replaying a CUDA graph does
    not read the current values of host tensors."""

    @classmethod
    def of(
        cls,
        guards: Any,
        compiled: CompiledGraph,
        last: tuple[Sequence[Any], Sequence[Any]],
        arguments: _Arguments,
        outputs: Outputs,
        known: Set[int],
    ) -> _Call | None:
        """Return the call, or None if a direct call is not possible.

        A direct call is possible if each tensor that the code reads is an argument or in `known`, and each output of
        the step is a result of the code.
        """
        inputs, results = last
        leaves = list(enumerate(_leaves(arguments[0], arguments[1])))
        # A `known` tensor in the batch is not treated as variable, because the guards check it if the step reads it
        # from the batch.
        variable = {id(leaf): i for i, leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in known}
        positions = [(i, variable[id(value)]) for i, value in enumerate(inputs) if id(value) in variable]
        if not all(id(value) in variable or id(value) in known for value in inputs):
            return None
        used_ids = {id(value) for value in inputs} & variable.keys()
        shared = [
            (i, variable[id(leaf)]) for i, leaf in leaves if id(leaf) in used_ids and variable[id(leaf)] != i
        ]
        fixed = [None if id(value) in variable else value for value in inputs]
        logs, finite = outputs
        index = {id(value): i for i, value in enumerate(results)}
        if not all(id(value) in index for value in (*logs.values(), *([] if finite is None else [finite]))):
            return None
        log_positions = {name: index[id(value)] for name, value in logs.items()}
        return cls(
            guards.check,
            structure_of(arguments[0]),
            compiled,
            fixed,
            positions,
            shared,
            log_positions,
            None if finite is None else index[id(finite)],
            len({value.device for value in inputs if isinstance(value, Tensor)}) == 1,
        )

    def shares_tensors(self, inputs: Any, grad_buffers: Sequence[Tensor] | None) -> bool:
        """Return whether arguments that were the same tensor in the call through Dynamo are still the same tensor."""
        if not self.shared:
            return True
        leaves = _leaves(inputs, grad_buffers)
        return all(leaves[i] is leaves[j] for i, j in self.shared)

    def tensors_read(self, inputs: Any, grad_buffers: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the argument tensors that the code reads."""
        leaves = _leaves(inputs, grad_buffers)
        return [leaves[leaf] for _, leaf in self.positions]

    def run(self, tensors: Sequence[Tensor]) -> Outputs:
        """Run the code with the tensors that `tensors_read` returns."""
        inputs = self.fixed.copy()
        for (position, _), tensor in zip(self.positions, tensors, strict=True):
            inputs[position] = tensor
        results = self.compiled.call(inputs)
        logs = {name: results[i] for name, i in self.logs.items()}
        return logs, None if self.finite is None else results[self.finite]


def _leaves(inputs: Any, grad_buffers: Sequence[Tensor] | None) -> list[Any]:
    return list(chain(leaves_of(inputs), grad_buffers or ()))


def _entries(code: Any) -> list[Any]:
    return list(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))
