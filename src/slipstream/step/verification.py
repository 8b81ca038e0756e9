"""Verify a compiled step against the eager step and a float64 reference, without side effects.

The verification computes the step for one batch on copies of the graph's inputs: with the compiled code, and by
interpreting the captured graph in float64, in the precision of the step, and with weights that are perturbed in two
opposite directions. The eager step then trains on the original inputs. The interpretations give an estimate of the
rounding error (`_rounding_error`). The compiled code and the eager step may differ from the float64 result by a small
multiple of this error. A larger error in the eager step indicates that the captured graph does not contain the whole
step. A larger error in the compiled code indicates a compiler bug.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from slipstream.errors import SlipstreamError
from slipstream.sharding import is_sharded

__all__ = [
    "Branches",
    "GraphCode",
    "NotCapturedError",
    "OnlyEagerError",
    "UnstableGraphError",
    "Verification",
    "VerificationNeeded",
    "WrongNumbersError",
    "copies",
    "interpret",
    "run_captured",
]

_LOWER_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)

_TOLERANCE_MULTIPLE = 4.0
"""Tolerated distance from the float64 result, as a multiple of the captured graph's rounding error."""
_MIN_TOLERANCE = 3e-5
"""Relative errors below this value are always tolerated."""
_PERTURBATION = 16
"""Relative perturbation of the weights, as a multiple of the machine epsilon."""
_LARGE = 2.0**20
"""Gradients multiplied by this factor are usually clipped; divided by it, they are not."""
_BRANCH_TOLERANCE = 1e-3
"""Tolerated relative difference between two runs with the same kernels, of which some may be nondeterministic."""
_TOLERANCE_WITHOUT_REFERENCE = 0.2
"""Tolerated relative error if the float64 reference is not available."""


class NotCapturedError(SlipstreamError, RuntimeError):
    """A step cannot be compiled as one graph."""

    @staticmethod
    def find_in(error: BaseException) -> NotCapturedError | None:
        """Return the `NotCapturedError` that `error` is or wraps, or None if there is none."""
        candidates = (error, getattr(error, "inner_exception", None), error.__cause__)
        return next((each for each in candidates if isinstance(each, NotCapturedError)), None)


class OnlyEagerError(NotCapturedError):
    """The whole step must run eagerly, because compilation would change its results."""


class UnstableGraphError(OnlyEagerError):
    """A step needs a new graph too often, because a value that is a constant in the graph changes."""


class WrongNumbersError(SlipstreamError, RuntimeError):
    """A compiled step and the eager step compute different results.

    Args:
        message: a description of the tensor and its error.
        compiler: whether the captured graph is correct but the compiled code is not.
    """

    def __init__(self, message: str, compiler: bool) -> None:
        super().__init__(message)
        self.compiler = compiler


class VerificationNeeded(BaseException):
    """A step has been captured and compiled, and must be verified with the current batch before it runs.

    Derives from `BaseException`, so that `except Exception` in user code does not catch it.
    """

    def __init__(self, code: GraphCode, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.code, self.inputs = code, inputs
        self.grad_buffers: list[Tensor] = []
        """The inputs that contain the accumulation window's gradients."""


class GraphCode:
    """The compiled code of a captured graph, which runs only after its verification.

    Args:
        graph: the captured graph.
        run: the compiled code.
        verified: whether the code may run without verification.
        effects: the attributes that Dynamo sets after the code has run (object's dict, name, value); None if it changes
            Python objects in other ways.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        run: Callable[..., Any],
        verified: bool,
        effects: Sequence[tuple[dict[str, Any], str, Any]] | None = None,
    ) -> None:
        self.graph, self.run, self.verified, self.effects = graph, run, verified, effects
        self.running = False
        """Whether the code is running. If this is still True after an exception, tensors may have changed."""
        self.guards: Any = None
        """Dynamo's guard manager."""
        self.last: tuple[tuple[Any, ...], Sequence[Any]] | None = None
        """Inputs and outputs of the last call through Dynamo."""

    def __call__(self, *inputs: Any) -> Any:
        """Run the code, or raise `VerificationNeeded` if it has not been verified."""
        if not self.verified:
            raise VerificationNeeded(self, inputs)
        self.running = True
        outputs = self.run(*inputs)
        self.running = False
        self.last = inputs, outputs
        return outputs


class Branches(NamedTuple):
    """What the verification must know about a step whose effect depends on the gradients."""

    skips: bool
    """Whether the step skips updates with gradients that are not finite."""
    guarded: Set[int]
    """Ids of the inputs that a skipped update does not change."""
    poisoned: Set[int]
    """Ids of inputs that cause a loss of NaN if they are NaN."""


_Values = Sequence[Tensor | None]


class Verification:
    """The results of a graph, computed on copies of its inputs, before the eager code uses the originals.

    All results are stored in host memory.

    Args:
        graph: the graph that Dynamo captured.
        run: its compiled code.
        inputs: the inputs of one call.
        names: names of the inputs, and of the other results, for messages.
        context: the random and autocast states of a run.
        finish: `finish(outputs, inputs)` runs the backward pass and returns the results: tensors, or None. They
            start with the inputs, which the graph may change. By default, these are the only results.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        run: Callable[..., Any],
        inputs: Sequence[Any],
        names: Sequence[str],
        context: Callable[[], AbstractContextManager[Any]],
        finish: Callable[[Any, Sequence[Any]], Sequence[Any]] = lambda _, inputs: inputs,
    ) -> None:
        self.inputs, self.names = inputs, names
        self._graph, self._run, self._context, self._finish = graph, run, context, finish
        self._before = _values(inputs)
        self._compiled = self._results(run)
        self._captured = self._reference()
        self._perturbation = _perturbation(inputs)
        self._raised = self._reference(perturbation=self._perturbation)
        self._lowered = self._reference(perturbation=-self._perturbation)
        self._exact = self._reference(double=True)

    def _results(self, run: Callable[..., Any], poisoned: Set[int] = frozenset()) -> _Values:
        """Return the results of `run` on copies of the inputs; the inputs in `poisoned` are replaced by NaN."""
        values = copies(self.inputs)
        with torch.no_grad():
            for value, copied in zip(self.inputs, values, strict=True):
                if id(value) in poisoned:
                    copied.fill_(torch.nan)
        with self._context():
            return _values(self._finish(run(*values), values))

    def _reference(self, double: bool = False, perturbation: int = 0) -> _Values | None:
        """Return the results of the captured graph with eager kernels, or None if the graph cannot be interpreted."""
        values = copies(self.inputs, torch.float64 if double else None)
        try:
            for value in values:
                _perturb(value, perturbation)
            with self._context():
                return _values(interpret(self._graph, values, double, lambda out: self._finish(out, values)))
        except torch.OutOfMemoryError:
            raise  # do not skip the reference for lack of memory, because the comparison would tolerate larger errors
        except Exception:  # an operator does not support float64, or only runs in compiled code
            return None

    def check_compiled(self) -> None:
        """Compare the compiled code with the captured graph and float64.

        Raises:
            WrongNumbersError: the error of a result is too large, or only one of the gradients exists.
        """
        captured = self._captured or self._results(lambda *values: run_captured(self._graph, values))
        _check_rows(self._rows(captured), compiler=True)

    def compare(
        self, results: Mapping[int, Tensor], updated: Collection[int], ignored: Collection[int]
    ) -> bool:
        """Compare the results with those of the eager step.

        Args:
            results: results of the eager step, by input id, for the inputs that the eager step does not change in
                place.
            updated: ids of the inputs that the captured step's update changes.
            ignored: ids of the inputs that the eager step changes outside the captured part.

        Returns:
            False if a gradient overflowed and the weights were not updated, otherwise True.

        Raises:
            WrongNumbersError: the numerical error of the eager step or of the compiled code is too large.
        """
        eager = _values([None if id(v) in ignored else results.get(id(v), v) for v in self.inputs])
        rows = self._rows(eager)
        if not any(row.moved and id(self.inputs[row.index]) in updated for row in rows):
            return False
        for compiler in (False, True):
            _check_rows(rows, compiler)
        return True

    def _rows(self, eager: _Values) -> list[_Row]:
        unknown = [None] * len(eager)
        references = (r or unknown for r in (self._captured, self._raised, self._lowered, self._exact))
        before = [*self._before, *unknown[len(self._before) :]]
        rows = []
        for index, (name, old, theirs, ours, *others) in enumerate(
            zip(self.names, before, eager, self._compiled, *references, strict=True)
        ):
            if theirs is not None and ours is not None:
                old = torch.zeros_like(theirs) if old is None else old
                rows.append(_Row.of(index, name, self._perturbation, old, theirs, ours, *others))
            elif old is None and (theirs is not None or (ours is not None and bool(ours.any()))):
                problem = "is missing" if ours is None else "should be None"
                raise WrongNumbersError(f"{name} {problem}", compiler=True)
        return rows

    def check_branches(self, branches: Branches) -> None:
        """Verify operations whose effect depends on the gradients, for example clipping and skipped updates.

        The captured graph must compute the same results from gradients that share memory and from separate copies of
        them. An update with a loss or a gradient that is not finite must not change the weights if the step skips it.

        Raises:
            WrongNumbersError: the results for such gradients are wrong.
        """
        if self._captured is None:
            return
        for factor in (_LARGE, 1 / _LARGE, torch.nan):
            gradients: list[list[Tensor]] = []
            found, expected = (
                self._results(_WithGradients(self._graph, factor, gradients, separate).run_step)
                for separate in (False, True)
            )
            problem = self._find_difference(found, expected)
            if branches.skips and factor != factor:
                problem = problem or self._find_change(found, branches.guarded)
            if problem is not None:
                what = "that are NaN" if factor != factor else f"that are multiplied by {factor:.0e}"
                raise WrongNumbersError(f"{problem} is wrong after gradients {what}", compiler=False)
        if branches.skips and branches.poisoned:
            captured = self._results(_Interpreter(self._graph).run_step, branches.poisoned)
            problem = self._find_change(self._results(self._run, branches.poisoned), branches.guarded)
            if problem is not None and self._find_change(captured, branches.guarded) is None:
                raise WrongNumbersError(f"a loss of NaN changes {problem}", compiler=True)

    def _find_difference(self, found: _Values, expected: _Values) -> str | None:
        """Return the name of an input that differs between two runs with the same kernels, or None."""
        for name, before, one, other in zip(self.names, self._before, found, expected, strict=True):
            if before is not None and one is not None and other is not None and not torch.equal(one, other):
                same = torch.equal(one.isnan(), other.isnan())
                distance, size = _distance(one.nan_to_num(), other.nan_to_num()), _distance(before, other)
                # Kernels may be nondeterministic. The size of a change to NaN is NaN.
                if not same or distance > _BRANCH_TOLERANCE * np.nan_to_num(size):
                    return name
        return None

    def _find_change(self, found: _Values, unchanged: Set[int]) -> str | None:
        """Return the name of an input in `unchanged` that a run has changed, or None."""
        for value, name, before, now in zip(self.inputs, self.names, self._before, found, strict=True):
            if (
                id(value) in unchanged
                and before is not None
                and now is not None
                and not torch.equal(before, now)
            ):
                return name
        return None

    @torch.no_grad()
    def copy_results(self, results: Mapping[int, Tensor], ignored: Collection[int]) -> None:
        """Copy the results of the compiled step to the inputs, as if the step had run without verification."""
        for value, before, compiled in zip(self.inputs, self._before, self._compiled, strict=True):
            if before is not None and compiled is not None and id(value) not in ignored:
                target = results.get(id(value), value)
                if not torch.equal(before, compiled):
                    target.copy_(compiled)


@dataclass(frozen=True)
class _Row:
    """Errors in the results for one tensor, as norms of the difference from the float64 reference."""

    index: int
    """Index of the result."""
    name: str
    elements: int
    size: float
    """Norm of the exact change."""
    moved: bool
    """Whether the captured graph changes the tensor."""
    noise: float
    """Estimated rounding error."""
    eager: float
    """Error of the eager step."""
    compiled: float
    """Error of the compiled code."""
    digits: float
    """Norm of the tensor times the machine epsilon of its dtype."""

    @classmethod
    def of(
        cls,
        index: int,
        name: str,
        perturbation: int,
        before: Tensor,
        eager: Tensor,
        compiled: Tensor,
        *references: Tensor | None,
    ) -> _Row:
        """Compare the results with the exact result or, if there is none, with the eager result."""
        captured, raised, lowered, exact = references
        if captured is None or raised is None or lowered is None or exact is None:
            captured, exact, noise = eager, eager, None
        else:
            noise = _rounding_error(captured, raised, lowered, exact, perturbation)
        size = _distance(before, exact)
        return cls(
            index,
            name,
            before.numel(),
            size=size,
            moved=not torch.equal(before, exact if before.dtype == torch.float64 else captured),
            noise=_TOLERANCE_WITHOUT_REFERENCE / _TOLERANCE_MULTIPLE * size if noise is None else noise,
            eager=_distance(eager, exact),
            compiled=_distance(compiled, exact),
            digits=torch.finfo(before.dtype).eps * float(before[before.isfinite()].double().norm())
            if before.is_floating_point()
            else 0.0,
        )

    @property
    def kind(self) -> str:
        """The kind of the tensor: weight, momentum, buffer, ..."""
        return self.name.partition("'")[0]

    def excess(self, distance: float, medians: Sequence[float]) -> float:
        """Return an error as a multiple of the tolerance, or infinity if the error is NaN.

        Args:
            distance: the error.
            medians: medians over the tensors of this kind, because a single tensor may be exact by chance or have a
                gradient of zero: of the rounding error relative to the change, and of both per element.
        """
        if not np.isfinite(self.noise):  # lower precisions may overflow
            return 0.0
        relative, noise, size = medians
        root = self.elements**0.5
        allowed = (
            _TOLERANCE_MULTIPLE * max(self.noise, relative * self.size, noise * root)
            + _MIN_TOLERANCE * max(self.size, size * root)
            + 4 * self.digits
        )
        if not np.isfinite(distance) or not np.isfinite(allowed) or not allowed:
            return float("inf") if distance else 0.0
        return float(distance / allowed)


def _check_rows(rows: Collection[_Row], compiler: bool) -> None:
    """Check the errors of the eager step or of the compiled code.

    Raises:
        WrongNumbersError: an error is too large.
    """
    found: list[tuple[float, _Row, float]] = []
    for kind in {row.kind for row in rows}:
        same = [row for row in rows if row.kind == kind]
        known = [row for row in same if row.size and np.isfinite(row.size) and np.isfinite(row.noise)]
        roots = [row.elements**0.5 for row in known]
        numbers = [(r.noise / r.size, r.noise / n, r.size / n) for r, n in zip(known, roots, strict=True)]
        medians = np.median(numbers, axis=0) if numbers else [0.0] * 3
        for row in same:
            distance = row.compiled if compiler else row.eager
            found.append((row.excess(distance, medians), row, distance))
    if not found:
        return
    excess, row, distance = max(found, key=itemgetter(0))
    if excess > 1:
        size = row.size or 1.0
        raise WrongNumbersError(
            f"{row.name} changes by {row.size:.2e}, with a relative error of {distance / size:.1e} against float64; "
            f"the expected rounding error is {row.noise / size:.1e}",
            compiler,
        )


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = _wide(one), _wide(other)
    return float(torch.where(one == other, 0.0, one - other).norm())  # the distance of equal infinities is 0


def _wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _values(tensors: Sequence[Any]) -> list[Tensor | None]:
    """Return copies of the tensors in host memory, and None for other values."""
    return [value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else None for value in tensors]


def _rounding_error(
    captured: Tensor, raised: Tensor, lowered: Tensor, exact: Tensor, perturbation: int
) -> float:
    """Estimate the rounding error of a result, as a norm.

    `raised` and `lowered` are the results for weights that are perturbed by plus and minus `perturbation` times the
    machine epsilon. A smooth function changes by opposite amounts, which are scaled to a perturbation of one epsilon.
    If a value next to zero changes its sign in a ReLU, or the maximum of a pooling window moves, the gradient changes
    by an amount that does not depend on the size of the perturbation, usually in only one of the two results. This
    changes their mean.
    """
    smooth = _distance(raised, lowered) / (2 * perturbation)
    mean = (_wide(raised) + _wide(lowered)) / 2
    return max(_distance(captured, exact), smooth, 2 * _distance(mean, exact))


def _is_trained(value: Any) -> bool:
    """Return whether a graph input is a trained tensor. Other inputs may contain class ids, which must not change."""
    return isinstance(value, Tensor) and value.requires_grad


@torch.no_grad()
def _perturb(value: Any, epsilons: int) -> None:
    """Multiply each element of a trained tensor by 1 plus or minus a multiple of the machine epsilon, in place."""
    if epsilons and _is_trained(value):
        generator = torch.Generator().manual_seed(0)  # does not change the global generator
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        value.mul_(1 + epsilons * torch.finfo(value.dtype).eps * signs.to(value.device, value.dtype))


def _perturbation(inputs: Sequence[Any]) -> int:
    """Return the size of a perturbation of the weights, as a multiple of their epsilon."""
    # A multiple of the epsilon of bfloat16 or float16 would not be a small perturbation.
    small = all(torch.finfo(value.dtype).eps < 1e-6 for value in inputs if _is_trained(value))
    return _PERTURBATION if small else 1


# ---- reference results -----------------------------------------------------------------------------------


def copies(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Return the inputs of a graph with each tensor copied. Lower-precision tensors are converted to `dtype`, if set.

    The copies have the strides and `requires_grad` of the originals. Copies of tensors that share memory also share
    memory.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    memory: dict[int, tuple[Any, Tensor]] = {}
    for group in _group_by_storage(tensors).values():
        start = min(tensor.storage_offset() for tensor in group)
        end = max(tensor.storage_offset() + _extent(tensor) for tensor in group)
        flat = torch.as_strided(group[0].detach(), (end - start,), (1,), start)
        target_dtype = dtype if dtype is not None and flat.dtype in _LOWER_PRECISIONS else flat.dtype
        memory.update(dict.fromkeys(map(id, group), (start, flat.to(target_dtype, copy=True))))
    copied: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) in memory:
            start, flat = memory[id(tensor)]
            new = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start).detach()
        else:
            new = tensor.detach().clone()
        copied[id(tensor)] = new.requires_grad_(tensor.requires_grad)
    return [copied[id(value)] if isinstance(value, Tensor) else value for value in inputs]


def _group_by_storage(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """Return the strided tensors, grouped by storage and dtype."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and not is_sharded(tensor):
            groups.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append(tensor)
    return groups


def _extent(tensor: Tensor) -> int:
    """Return the number of storage elements from the tensor's first to its last element, inclusive."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def run_captured(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a captured graph with torch's kernels, without checkpoints, which reject changes of their buffers."""
    return interpret(graph, inputs) if torch.is_grad_enabled() else graph(*inputs)


def interpret(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    double: bool = False,
    finish: Callable[[Any], Any] = lambda outputs: outputs,
) -> Any:
    """Run a graph captured by Dynamo, operator by operator, and return `finish(outputs)`.

    Tensors in `inputs` are modified in place.

    Args:
        graph: the graph that `torch.compile` passes to a backend.
        inputs: the graph's inputs; if `double` is true, the result of `copies(..., torch.float64)`.
        double: whether to compute in float64 and without autocast. Random numbers are still drawn in lower
            precision, because drawing them in float64 would change their values.
        finish: called with the outputs, for example to run their backward pass in the same precision.
    """
    with torch.enable_grad(), _InFloat64() if double else nullcontext():
        return finish(_Interpreter(graph, double).run(*inputs))


class _Interpreter(fx.Interpreter):
    """Runs a graph and ignores activation checkpointing, which does not affect the results."""

    def __init__(self, graph: fx.GraphModule, double: bool = False) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._autocasts = not double

    def run_step(self, *inputs: Any) -> Any:
        """Run a step, which computes gradients itself."""
        with torch.enable_grad():
            return self.run(*inputs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _Interpreter(args[0], not self._autocasts).run(*args[1:])
        if not self._autocasts and target is torch.amp.autocast_mode._enter_autocast:
            return None
        if not self._autocasts and target is torch.amp.autocast_mode._exit_autocast:
            return None
        return super().call_function(target, args, kwargs)


class _WithGradients(_Interpreter):
    """Runs a graph with gradients that are multiplied by a factor.

    Args:
        gradients: the gradients of each call to `torch.autograd.grad`, which the first run stores.
        separate: whether to use copies of the stored gradients, none of which share memory.
    """

    def __init__(
        self, graph: fx.GraphModule, factor: float, gradients: list[list[Tensor]], separate: bool
    ) -> None:
        super().__init__(graph)
        self._factor, self._gradients, self._separate = factor, gradients, separate
        self._calls = iter(list(gradients))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.autograd.grad:
            return super().call_function(target, args, kwargs)
        if self._separate:
            return tuple(gradient.clone() for gradient in next(self._calls))
        found = super().call_function(target, args, kwargs)
        scaled = copies([gradient.detach() for gradient in found])
        for group in _group_by_storage(scaled).values():
            memory = group[0].untyped_storage().nbytes() // group[0].element_size()
            group[0].as_strided((memory,), (1,), 0).mul_(self._factor)
        self._gradients.append([gradient.clone() for gradient in scaled])
        return tuple(scaled)


class _InFloat64(TorchDispatchMode):
    """Replaces lower precisions with float64 in all operators, except when they draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _draw(func, args, kwargs)
        args, kwargs = tree_map(_float64_dtype, (args, kwargs))
        return tree_map_only(Tensor, _in_float64, func(*args, **kwargs))


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw random numbers in lower precision: convert float64 tensors to float32, and keep dtype arguments."""
    lower_args, lower_kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
    out = func(*lower_args, **lower_kwargs)
    if func._schema.is_mutable and isinstance(args[0], Tensor):
        return args[0].copy_(out)
    return tree_map_only(Tensor, _in_float64, out)


def _float64_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER_PRECISIONS else value


def _in_float64(value: Tensor) -> Tensor:
    return value.to(torch.float64) if value.dtype in _LOWER_PRECISIONS else value


def _in_float32(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype == torch.float64 else value
