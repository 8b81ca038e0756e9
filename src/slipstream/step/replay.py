"""Verify the compiled code of a module by repeating one of its calls on copies.

Training uses the eager call. A `Recording` contains what the call reads (arguments, buffers, Python attributes, random
states) and, recorded by hooks, the gradients of its outputs. After the backward pass, the call is repeated on copies:
eagerly, and as captured by Dynamo, with torch's own kernels. Both must agree bitwise. Finally, the compiled code of
each graph is compared with a float64 reference, with the tolerances of `slipstream.step.verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.step.leaves import leaves_of
from slipstream.step.snapshot import RandomState, Reachable, Snapshot, version_of
from slipstream.step.verification import (
    NotCapturedError,
    Verification,
    WrongNumbersError,
    copies,
    run_captured,
)

__all__ = ["CapturedGraph", "Recording"]

_COMPARED = (int, float, complex, bool, str, bytes, frozenset, type(None))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal, bitwise in the case of tensors. NaNs are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return bool(same)
    if not isinstance(one, Tensor):
        return not isinstance(one, _COMPARED) or bool(one == other or one != one)
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


# ---- one call ----------------------------------------------------------------------------------------


class Recording:
    """A call of a module, to be repeated after its backward pass.

    Args:
        module: the module.
        args, kwargs: the arguments of the call.

    Attributes:
        before: the state before the call.
        gradients: the gradient of each output tensor, by its index, after the backward pass.
        problem: the reason why the module must run eagerly, or None.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        param = next(module.parameters(), None)
        self.device = torch.device("cpu") if param is None else param.device
        self.module = module
        self.before = Snapshot(module, (args, kwargs))
        self.problem = self.before.problem
        self._random = RandomState(self.device)
        self._grad = torch.is_grad_enabled()
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", self.device.type}
        }
        # Dynamo divides the graph of a module inside DDP, so that communication starts early.
        self._ddp = DistributedDataParallel._get_active_ddp_module()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call eagerly, and record its results."""
        outputs = self.module._call_impl(*args, **kwargs)
        self._real = self._results(outputs, (args, kwargs))
        self.gradients = self.observe(_tensors(outputs))
        return outputs

    def observe(self, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Record the gradients of outputs by index, and backward passes that compiled code does not support.

        Compiled code has one autograd node for all outputs, so backward passes through different outputs count as
        several passes. A gradient with respect to an output does not run that output's node.
        """
        grads: dict[int, Tensor] = {}
        passes: set[int] = set()

        # Dynamo must not trace these functions, because it would report that the module changes this object.
        @torch.compiler.disable
        def check(_: Any) -> None:
            passes.add(torch._C._current_graph_task_id())
            if torch.is_grad_enabled():  # backward sets the grad mode to `create_graph`
                self.problem = "the loss differentiates the model's gradients (create_graph=True)"
            elif len(passes) > 1 and self.problem is None:
                self.problem = (
                    "there are several backward passes through the model's outputs (retain_graph=True)"
                )

        @torch.compiler.disable
        def record(i: int, grad: Tensor) -> None:
            grads[i] = grad.detach().clone()

        for node in filter(None, {tensor.grad_fn for tensor in outputs}):
            node.register_prehook(check)
        for i, tensor in enumerate(outputs):
            if tensor.grad_fn is not None:  # a hook on a parameter would remain
                tensor.register_hook(partial(record, i))
        return grads

    def _results(self, outputs: Any, arguments: Any) -> dict[str, Any]:
        """Return copies of the outputs, the arguments and the state."""
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(outputs)]
        found = {f"output {i}": leaf for i, leaf in enumerate(leaves)}
        found |= Reachable().add(self.module).add(arguments, "argument").copied()
        return found | RandomState(self.device).values()

    @contextmanager
    def copied(self) -> Iterator[Any]:
        """Replace the state with copies of the state before the call, and put everything back on exit.

        Yields:
            Copies of the arguments.
        """
        with ExitStack() as stack:
            stack.callback(RandomState(self.device).restore)
            ddp = DistributedDataParallel
            stack.callback(setattr, ddp, "_active_ddp_module", ddp._active_ddp_module)
            ddp._active_ddp_module = self._ddp
            self._random.restore()
            for kind, (dtype, enabled) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            yield stack.enter_context(self.before.installed())

    def replay(self, call: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Repeat the call and its backward pass on copies; return the results after each of them."""
        with self.copied() as arguments:
            args, kwargs = arguments
            outputs = call(*args, **kwargs)
            forward = self._results(outputs, arguments)
            named: dict[str, Tensor] = {
                f"the gradient of '{n}'": p for n, p in self.module.named_parameters()
            }
            named |= {f"the gradient of argument {i}": t for i, t in enumerate(_tensors(arguments))}
            named = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
            grads = gradients(_tensors(outputs), self.gradients, list(named.values()))
            return forward, self._results(outputs, arguments) | dict(zip(named, grads, strict=True))

    def verify(self, captured: Callable[..., Any]) -> bool:
        """Compare the call with its repetitions: captured by Dynamo, with torch's kernels, and eager.

        Returns:
            Whether all gradients are finite.

        Raises:
            NotCapturedError: the module must run eagerly.
            WrongNumbersError: the results are not bitwise equal.
        """
        # First, because Dynamo reports which objects the call changes.
        after_capture = self.replay(captured)[1]
        forward, after = self.replay(self.module._call_impl)
        if (problem := _difference(self._real, forward)) is not None:
            raise NotCapturedError(f"a repetition of the same eager call has different results: {problem}")
        if (problem := _difference(after, after_capture)) is not None:
            raise WrongNumbersError(problem, compiler=False)
        if self.problem is not None:  # the repetition ran a backward pass in forward
            raise NotCapturedError(self.problem)
        grads = (value for key, value in after.items() if key.startswith("the gradient"))
        return all(grad is None or bool(grad.isfinite().all()) for grad in grads)

    def names(self) -> dict[int, str]:
        """Return the names of the module's parameters and installed buffers by id."""
        values = Reachable().add(self.module).values
        names = {id(value): name for name, value in values.items() if isinstance(value, Tensor)}
        return names | {id(p): f"the weight '{name}'" for name, p in self.module.named_parameters()}


def gradients(
    outputs: Sequence[Tensor], grads: Mapping[int, Tensor], inputs: Sequence[Tensor], retain: bool = False
) -> list[Tensor | None]:
    """Return the gradients of `inputs`, for the given gradients of outputs by index; None if there are none."""
    used = [i for i in grads if outputs[i].requires_grad]
    if not used or not inputs:
        return [None] * len(inputs)
    vectors = [grads[i].to(outputs[i].dtype) for i in used]
    with torch.autocast("cpu", enabled=False), torch.autocast(outputs[0].device.type, enabled=False):
        found: Sequence[Tensor | None] = torch.autograd.grad(
            [outputs[i] for i in used], inputs, vectors, retain_graph=retain, allow_unused=True
        )
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in found]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _difference(some: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Return the first difference between values, or None."""
    missing = object()
    for name in {**some, **others}:
        one, other = some.get(name, missing), others.get(name, missing)
        if not _equal(one, other):
            is_none = (one is None) != (other is None)
            return f"{name} is None in only one of them" if is_none else f"{name} differs"
    return None


# ---- one graph ---------------------------------------------------------------------------------------


class CapturedGraph:
    """A graph that Dynamo captured, and its compiled code, which runs only after its verification.

    Args:
        graph: the graph.
        run: the compiled code.

    Attributes:
        verified: whether the compiled code may run.
    """

    def __init__(self, graph: fx.GraphModule, run: Callable[..., Any]) -> None:
        self.graph, self.run, self.verified = graph, run, False
        self._recording: Recording | None = None

    def capture(self, inputs: Sequence[Any], recording: Recording) -> Any:
        """Run the graph with torch's kernels; record the inputs and the gradients of the outputs of the first call."""
        recording.before.add(value for value in inputs if isinstance(value, Tensor))
        if self.verified or self._recording is recording:
            return run_captured(self.graph, inputs)
        self._recording = recording
        names = recording.names()
        self._names = [names.get(id(value), f"graph input {i}") for i, value in enumerate(inputs)]
        self._inputs, self._before = copies(inputs), RandomState(recording.device)
        self._versions = [(value, version_of(value)) for value in inputs]
        outputs = run_captured(self.graph, inputs)
        self._after = RandomState(recording.device).values()
        self._gradients = recording.observe(_tensors(outputs))
        return outputs

    def verify(self, recording: Recording) -> None:
        """Compare the compiled code with float64, and enable it.

        Raises:
            WrongNumbersError: a result or the use of random numbers differs.
            NotCapturedError: backward reads a tensor that the call changes.
        """
        inputs, self._inputs, self._recording = self._inputs, [], None
        versions, self._versions = self._versions, []
        changed = {i for i, (v, version) in enumerate(versions) if version_of(v) != version}
        trained = [i for i, v in enumerate(inputs) if isinstance(v, Tensor) and v.requires_grad]

        def context() -> AbstractContextManager[None]:
            self._before.restore()
            torch.clear_autocast_cache()
            return nullcontext()

        def run(*values: Any) -> Any:
            outputs = self.run(*values)
            if problem := _difference(self._after, RandomState(recording.device).values()):
                raise WrongNumbersError(problem, compiler=True)
            return outputs

        def finish(outputs: Any, values: Sequence[Any]) -> list[Any]:
            leaves = [values[i] for i in trained]
            return [*values, *_tensors(outputs), *gradients(_tensors(outputs), self._gradients, leaves)]

        with recording.copied():
            if changed and torch.is_grad_enabled():
                # torch's compiler may compute values again in backward, from inputs that a later call has changed. If
                # eager code also keeps an input, autograd does not allow such a change, or does not read the input.
                kept, by_eager = (
                    _kept(code, copies(inputs))
                    for code in (self.run, lambda *values: run_captured(self.graph, values))
                )
                for i in changed & kept - by_eager:
                    raise NotCapturedError(
                        f"its backward pass may read {self._names[i]} after it has changed"
                    )
            reached = _reached(_tensors(run_captured(self.graph, values := copies(inputs))), values, trained)
            names = [
                *self._names,
                *(f"output '{i}'" for i in range(len(reached))),
                *(f"the gradient of {self._names[i]}" for i in trained),
            ]
            Verification(self.graph, run, inputs, names, context, finish).check_compiled()
        if any(some and some != set().union(*reached) for some in reached):
            self.run = _without_zeros(self.run, reached)
        self.verified = True


def _storage(value: Any) -> int | None:
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_strided else None


def _kept(run: Callable[..., Any], inputs: Sequence[Any]) -> set[int]:
    """Run code; return the indices of the inputs that it keeps for the backward pass."""
    storages: set[int | None] = set()

    def pack(tensor: Tensor) -> Tensor:
        storages.add(_storage(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*inputs)
    return {i for i, value in enumerate(inputs) if _storage(value) in storages}


def _reached(outputs: Sequence[Tensor], inputs: Sequence[Any], trained: Sequence[int]) -> list[set[int]]:
    """Return, for each output, the indices of the inputs that receive a gradient from it."""
    leaves, found = [inputs[i] for i in trained], []
    for number, output in enumerate(outputs):
        ones = {} if output.grad_fn is None else {number: torch.ones_like(output)}
        grads = gradients(outputs, ones, leaves, retain=True)
        found.append({i for i, grad in zip(trained, grads, strict=True) if grad is not None})
    return found


def _without_zeros(run: Callable[..., Any], reached: Sequence[set[int]]) -> Callable[..., Any]:
    """Return compiled code whose unused outputs have no gradient, instead of a gradient of zeros, as in eager mode.

    Args:
        run: the compiled code, which has one autograd node for all outputs.
        reached: the inputs that receive a gradient from each output.
    """

    def call(*inputs: Any) -> Any:
        outputs = run(*inputs)
        nodes: dict[Any, dict[int, set[int]]] = {}
        for output, some in zip(_tensors(outputs), reached, strict=True):
            node, number = output.grad_fn, output.output_nr
            while node is not None and type(node).__name__ != "CompiledFunctionBackward":
                node, number = node.next_functions[0] if node.next_functions else (None, 0)
            if node is not None and some:
                nodes.setdefault(node, {}).setdefault(number, set()).update(some)
        for node, wanted in nodes.items():
            _clear(node, wanted, inputs)
        return outputs

    return call


def _clear(node: Any, reached: Mapping[int, set[int]], inputs: Sequence[Any]) -> None:
    """Remove the gradients that `node` computes for inputs that no used output of it reaches."""
    tensors = {i: v for i, v in enumerate(inputs) if isinstance(v, Tensor) and v.requires_grad}
    edges = {tuple(torch.autograd.graph.get_gradient_edge(v))[:2]: i for i, v in tensors.items()}
    keys = [edges.get(edge) for edge in node.next_functions]
    used: set[int] = set()

    def before(grads: Sequence[Tensor | None]) -> None:
        used.update(*(some for number, some in reached.items() if grads[number] is not None))

    def after(results: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            None if key is not None and key not in used else grad
            for key, grad in zip(keys, results, strict=True)
        )

    node.register_prehook(before)
    node.register_hook(after)
