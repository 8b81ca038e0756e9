"""Verify the compiled code of a module by repeating one of its calls on copies.

Training uses the eager call. A `Recording` contains what the call reads (arguments, buffers, Python attributes, random
states) and, recorded by hooks, the gradients of its outputs. After the backward pass, the call is repeated on copies:
eagerly, and as captured by Dynamo, with torch's own kernels. Both must agree bitwise. Finally, the compiled code of
each graph is compared with a float64 reference, with the tolerances of `slipstream.step.verification`.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.step.leaves import leaves_of
from slipstream.step.snapshot import ChangedObjects, Reachable, Snapshot
from slipstream.step.verification import (
    NotCapturedError,
    Verification,
    WrongNumbersError,
    copies,
    run_captured,
)

__all__ = ["CapturedGraph", "Recording"]

_COMPARED = (int, float, complex, bool, str, bytes, frozenset, type(None))


# ---- state -------------------------------------------------------------------------------------------


class _RandomState:
    """The random states of torch (on the CPU and on a device), NumPy and Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._on_device = None if self._module is None else self._module.get_rng_state(device)

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        np.random.set_state(self._states[1])
        random.setstate(self._states[2])
        if self._module is not None:
            self._module.set_rng_state(self._on_device, self._device)

    def values(self) -> dict[str, Any]:
        kinds = dict(zip(("torch", "NumPy", "Python"), map(pickle.dumps, self._states[1:]), strict=False))
        values = {"torch": self._states[0], "the device": self._on_device, **kinds}
        return {f"the random state of {kind}": value for kind, value in values.items()}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal, bitwise in the case of tensors. NaNs are equal."""
    if isinstance(one, torch.Generator) and isinstance(other, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and (not isinstance(one, _COMPARED) or one == other or one != one)
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
        gradients: the gradient of each output tensor, by its index, after the backward pass.
        problem: the reason why compiled code does not support the backward pass, or None.
        is_finite: whether all gradients of the repeated call are finite.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        param = next(module.parameters(), None)
        self.device = torch.device("cpu") if param is None else param.device
        self.module = module
        self._before = Snapshot(module, (args, kwargs))
        self.problem = self._before.problem
        self.is_finite = True
        self.changed = ChangedObjects()
        self._random = _RandomState(self.device)
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
        return found | _RandomState(self.device).values()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Set the autocast state of the call."""
        with ExitStack() as stack:
            for kind, (dtype, enabled) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    @contextmanager
    def copied(self) -> Iterator[Any]:
        """Replace the state with copies of the state before the call, and put everything back on exit.

        Yields:
            Copies of the arguments.
        """
        random_now = _RandomState(self.device)
        active = DistributedDataParallel._active_ddp_module
        hooks = [p._backward_hooks for p in self.module.parameters() if p._backward_hooks]
        saved = [dict(each) for each in hooks]
        try:
            for each in hooks:
                each.clear()
            DistributedDataParallel._active_ddp_module = self._ddp
            self._random.restore()
            with self._before.installed() as arguments:
                try:
                    with torch.set_grad_enabled(self._grad):
                        yield arguments
                finally:
                    self.changed.restore()
        finally:
            random_now.restore()
            DistributedDataParallel._active_ddp_module = active
            for each, old in zip(hooks, saved, strict=True):
                each.update(old)

    def replay(self, call: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Repeat the call and its backward pass on copies; return the results after each of them."""
        with self.copied() as arguments:
            args, kwargs = arguments
            with self.autocast():
                outputs = call(*args, **kwargs)
            forward = self._results(outputs, arguments)
            named: dict[str, Tensor] = {
                f"the gradient of '{n}'": p for n, p in self.module.named_parameters()
            }
            named |= {f"the gradient of argument {i}": t for i, t in enumerate(_tensors(arguments))}
            named = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
            grads = gradients(_tensors(outputs), self.gradients, list(named.values()))
            return forward, self._results(outputs, arguments) | dict(zip(named, grads, strict=True))

    def verify(self, captured: Callable[..., Any]) -> None:
        """Compare the call with its repetitions: captured by Dynamo, with torch's kernels, and eager.

        Raises:
            WrongNumbersError: the results are not bitwise equal.
        """
        # First, because Dynamo reports which objects the call changes.
        after_capture = self.replay(captured)[1]
        forward, after = self.replay(self.module._call_impl)
        if (problem := _difference(self._real, forward)) is not None:
            raise NotCapturedError(f"a repetition of the same eager call has different results: {problem}")
        if (problem := _difference(after, after_capture)) is not None:
            raise WrongNumbersError(problem, compiler=False)
        grads = (
            value for key, value in after.items() if key.startswith("the gradient") and value is not None
        )
        self.is_finite = all(bool(grad.isfinite().all()) for grad in grads)

    def has_finite_gradients(self) -> bool:
        """Return whether there are gradients to verify, and all are finite."""
        return bool(self.gradients) and all(bool(g.isfinite().all()) for g in self.gradients.values())

    def names(self) -> dict[int, str]:
        """Return the names of the module's parameters and installed buffers by id."""
        values = Reachable().add(self.module).values
        names = {id(value): name for name, value in values.items() if isinstance(value, Tensor)}
        return names | {id(p): f"the weight '{name}'" for name, p in self.module.named_parameters()}


def gradients(
    outputs: Sequence[Tensor], grads: Mapping[int, Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of `inputs`, for the given gradients of outputs by index; None if there are none."""
    used = [i for i in grads if outputs[i].requires_grad]
    if not used or not inputs:
        return [None] * len(inputs)
    vectors = [grads[i].to(outputs[i].dtype) for i in used]
    with torch.autocast("cpu", enabled=False), torch.autocast(outputs[0].device.type, enabled=False):
        found: Sequence[Tensor | None] = torch.autograd.grad(
            [outputs[i] for i in used], inputs, vectors, allow_unused=True
        )
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in found]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _difference(some: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Return the first difference between values, or None."""
    for name in dict.fromkeys([*some, *others]):
        if name not in some or name not in others:
            return f"{name} exists in only one of them"
        one, other = some[name], others[name]
        if not _equal(one, other):
            if (one is None) != (other is None):
                return f"{name} is None in only one of them"
            return f"{name} differs"
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
        recording.changed.add(value for value in inputs if isinstance(value, Tensor))
        if self.verified or self._recording is recording:
            return run_captured(self.graph, inputs)
        self._recording = recording
        names = recording.names()
        self._names = [names.get(id(value), f"graph input {i}") for i, value in enumerate(inputs)]
        self._inputs, self._before = copies(inputs), _RandomState(recording.device)
        constants = {
            i: value._version
            for i, value in enumerate(inputs)
            if isinstance(value, Tensor) and not value.requires_grad
        }
        outputs = run_captured(self.graph, inputs)
        self._owned = {i for i in constants if id(inputs[i]) in names}
        self._changed = {i for i, version in constants.items() if inputs[i]._version != version}
        self._after = _RandomState(recording.device).values()
        self._gradients = recording.observe(_tensors(outputs))
        return outputs

    def verify(self, recording: Recording) -> None:
        """Compare the compiled code with float64, and enable it.

        Raises:
            WrongNumbersError: a result or the use of random numbers differs.
            NotCapturedError: an output is a view of a buffer that backward reads and that may change before.
        """
        inputs, self._inputs, self._recording = self._inputs, [], None
        with recording.copied(), recording.autocast():
            values = copies(inputs)
            outputs, kept_by_eager = _kept(self.graph, values)
            reached = _reached(_tensors(outputs), values)
            unsafe = self._changed | self._owned - kept_by_eager if torch.is_grad_enabled() else set[int]()
            if unsafe:
                outputs, kept = _kept(self.run, values := copies(inputs))
                unsafe &= kept
        if unsafe:
            views = [each for each in _tensors(outputs) if not any(each is value for value in values)]
            if _storages(values[i] for i in unsafe) & _storages(views):
                raise NotCapturedError(f"an output is a view of {self._names[min(unsafe)]}")
            self.run = _with_copies(self.run, sorted(unsafe), self._changed)
        trained = [
            name
            for name, v in zip(self._names, inputs, strict=True)
            if isinstance(v, Tensor) and v.requires_grad
        ]

        @contextmanager
        def context() -> Iterator[None]:
            self._before.restore()
            with recording.autocast():
                yield

        def run(*values: Any) -> Any:
            outputs = self.run(*values)
            if problem := _difference(self._after, _RandomState(recording.device).values()):
                raise WrongNumbersError(problem, compiler=True)
            return outputs

        def finish(outputs: Any, values: Sequence[Any]) -> list[Any]:
            leaves = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
            return [*values, *_tensors(outputs), *gradients(_tensors(outputs), self._gradients, leaves)]

        names = [
            *self._names,
            *(f"output '{i}'" for i in range(len(reached))),
            *(f"the gradient of {n}" for n in trained),
        ]
        with recording.copied():
            Verification(self.graph, run, inputs, names, context, finish).check_compiled()
        if any(some is not None and some != set().union(*filter(None, reached)) for some in reached):
            self.run = _without_zeros(self.run, reached)
        self.verified = True


def _storages(tensors: Iterable[Any]) -> set[int]:
    return {
        t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided
    }


def _kept(run: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, set[int]]:
    """Run code; return its outputs, and the indices of the inputs that it keeps for the backward pass."""
    storages: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storages.update(_storages([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run(*inputs)
    return outputs, {i for i, value in enumerate(inputs) if _storages([value]) & storages}


def _with_copies(run: Callable[..., Any], kept: Sequence[int], changed: Set[int]) -> Callable[..., Any]:
    """Return compiled code whose backward pass reads the values that inputs had before the call.

    torch's compiler may compute values again in backward, from inputs that forward or a later call has changed.

    Args:
        run: the compiled code.
        kept: the inputs to pass as copies, which backward reads.
        changed: the inputs that forward changes.
    """

    def call(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*inputs)
        own = dict(zip(kept, copies([inputs[i] for i in kept]), strict=True))
        outputs = run(*(own.get(i, value) for i, value in enumerate(inputs)))
        new = [(inputs[i], value, value.clone()) for i, value in own.items() if i in changed]
        with torch.no_grad():
            for original, value, _ in new:
                value.data.copy_(
                    original
                )  # `data`, because autograd would reject the change of a kept tensor
            for original, _, result in new:
                original.copy_(result)
        originals = {id(value): inputs[i] for i, value in own.items()}
        return tuple(originals.get(id(value), value) for value in outputs)

    return call


def _reached(outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[set[int] | None]:
    """Return, for each output, the indices of the inputs that receive a gradient from it; None if it has none."""
    indices = {id(value): i for i, value in enumerate(inputs)}
    found: list[set[int] | None] = []
    for output in outputs:
        if not output.requires_grad or output.grad_fn is None:
            found.append(None)
            continue
        seen, nodes, reached = {output.grad_fn}, [output.grad_fn], set()
        while nodes:
            node = nodes.pop()
            reached.add(indices.get(id(getattr(node, "variable", None)), -1))
            new = {source for source, _ in node.next_functions if source is not None} - seen
            seen |= new
            nodes += new
        found.append(reached - {-1})
    return found


def _without_zeros(run: Callable[..., Any], reached: Sequence[set[int] | None]) -> Callable[..., Any]:
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
            if node is not None and some is not None:
                nodes.setdefault(node, {}).setdefault(number, set()).update(some)
        for node, wanted in nodes.items():
            _clear(node, wanted, inputs)
        return outputs

    return call


def _clear(node: Any, reached: Mapping[int, set[int]], inputs: Sequence[Any]) -> None:
    """Remove the gradients that `node` computes for inputs that no used output of it reaches."""
    edges = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.requires_grad:
            edge = torch.autograd.graph.get_gradient_edge(value)
            edges[edge.node, edge.output_nr] = i
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
