"""Verify a compiled step against the eager step and a float64 reference, without side effects.

The verification computes the step for one batch on copies of the graph's inputs: with the compiled code, and by
interpreting the captured graph in float64, in the precision of the step, and with weights that are perturbed in two
opposite directions. The eager step then trains on the original inputs. The interpretations give an estimate of the
rounding error (`_rounding_error`). The compiled code and the eager step may differ from the float64 result by a small
multiple of this error. A larger error in the eager step indicates that the captured graph does not contain the whole
step. A larger error in the compiled code indicates a compiler bug.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._prims_common import compute_required_storage_length
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from slipstream.errors import SlipstreamError
from slipstream.sharding import is_sharded

__all__ = [
    "GraphCode", "NotCapturedError", "OnlyEagerError", "UnstableGraphError", "Verification",
    "VerificationNeeded", "WrongNumbersError", "copies", "run_captured",
]  # fmt: skip

_LOWER_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)

# Tolerated distance from the float64 result, as a multiple of the captured graph's rounding error.
_TOLERANCE_MULTIPLE = 4.0
_MIN_TOLERANCE = 3e-5  # relative errors below this value are always tolerated
_PERTURBATION = 16  # relative perturbation of the weights, as a multiple of the machine epsilon
_TOLERANCE_WITHOUT_REFERENCE = 0.2  # tolerated relative error if the float64 reference is not available


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
        self.grad_buffers: list[Tensor] = []  # the inputs that contain the accumulation window's gradients


@dataclass(eq=False)
class GraphCode:
    """The compiled code of a captured graph, which runs only after its verification.

    Attributes:
        graph: the captured graph.
        run: the compiled code.
        verified: whether the code may run without verification.
        effects: the attributes that Dynamo sets after the code has run (object's dict, name, value); None if it changes
            Python objects in other ways.
        running: whether the code is running. If this is still True after an exception, tensors may have changed.
        guards: Dynamo's guard manager.
        last: inputs and outputs of the last call through Dynamo.
    """

    graph: fx.GraphModule
    run: Callable[..., Any]
    verified: bool
    effects: Sequence[tuple[dict[str, Any], str, Any]] | None = None
    running: bool = False
    guards: Any = None
    last: tuple[tuple[Any, ...], Sequence[Any]] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the code, or raise `VerificationNeeded` if it has not been verified."""
        if not self.verified:
            raise VerificationNeeded(self, inputs)
        self.running = True
        outputs = self.run(*inputs)
        self.running = False
        self.last = inputs, outputs
        return outputs


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
        self._before = [*_values(inputs), *[None] * (len(names) - len(inputs))]
        self._perturbation = _perturbation(inputs)
        self._compiled = self._results(run)
        self._captured = self._reference()
        raised = self._reference(perturbation=self._perturbation)
        lowered = self._reference(perturbation=-self._perturbation)
        self._references = self._captured, raised, lowered, self._reference(double=True)

    def _results(
        self,
        run: Callable[..., Any],
        double: bool = False,
        perturbation: int = 0,
        poisoned: Set[int] = frozenset(),
    ) -> _Values:
        """Return the results of `run` on copies of the inputs; the inputs in `poisoned` are replaced by NaN."""
        values = copies(self.inputs, double)
        with torch.no_grad():
            for value, copied in zip(self.inputs, values, strict=True):
                _perturb(copied, perturbation)
                if id(value) in poisoned:
                    copied.fill_(torch.nan)
        with self._context(), _InFloat64() if double else nullcontext():
            return _values(self._finish(run(*values), values))

    def _reference(self, double: bool = False, perturbation: int = 0) -> _Values | None:
        """Return the results of the captured graph with eager kernels, or None if the graph cannot be interpreted."""
        try:
            return self._results(_Interpreter(self._graph, double).run, double, perturbation)
        except torch.OutOfMemoryError:
            raise  # do not skip the reference for lack of memory, because the comparison would tolerate larger errors
        except Exception:  # an operator does not support float64, or only runs in compiled code
            return None

    def check_compiled(self) -> None:
        """Compare the compiled code with the captured graph and float64.

        Raises:
            WrongNumbersError: the error of a result is too large, or only one of the gradients exists.
        """
        captured = self._captured or self._results(_Interpreter(self._graph).run)
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
        if self._find_change(self._captured or eager, updated) is None:
            return False
        for compiler in (False, True):
            _check_rows(rows, compiler)
        return True

    def _rows(self, eager: _Values) -> list[_Row]:
        references = [found or [None] * len(eager) for found in self._references]
        rows = []
        for name, old, theirs, ours, *others in zip(
            self.names, self._before, eager, self._compiled, *references, strict=True
        ):
            if theirs is not None and ours is not None:
                before = torch.zeros_like(theirs) if old is None else old
                rows.append(_Row(name, self._perturbation, before, theirs, ours, others))
            elif old is None and (theirs is not None or (ours is not None and bool(ours.any()))):
                problem = "is missing" if ours is None else "should be None"
                raise WrongNumbersError(f"{name} {problem}", compiler=True)
        return rows

    def check_skipped(self, guarded: Set[int], poisoned: Set[int]) -> None:
        """Verify that an update with a loss or gradients that are not finite is skipped.

        Args:
            guarded: ids of the inputs that a skipped update does not change.
            poisoned: ids of inputs that cause a loss of NaN if they are NaN.

        Raises:
            WrongNumbersError: such an update changes one of the inputs.
        """
        if self._captured is None:
            return
        name = self._find_change(self._results(_NanGradients(self._graph).run), guarded)
        if name is not None:
            raise WrongNumbersError(f"gradients of NaN change {name}", compiler=False)
        captured = self._results(_Interpreter(self._graph).run, poisoned=poisoned)
        if self._find_change(captured, guarded) is None:
            name = self._find_change(self._results(self._run, poisoned=poisoned), guarded)
        if name is not None:
            raise WrongNumbersError(f"a loss of NaN changes {name}", compiler=True)

    def _find_change(self, found: _Values, inputs: Collection[int]) -> str | None:
        """Return the name of an input, out of those with these ids, that a run has changed, or None."""
        values = zip(self.inputs, self.names, self._before, found, strict=True)
        changed = (name for value, name, old, new in values if id(value) in inputs and _differ(old, new))
        return next(changed, None)

    @torch.no_grad()
    def copy_results(self, results: Mapping[int, Tensor], ignored: Collection[int]) -> None:
        """Copy the results of the compiled step to the inputs, as if the step had run without verification."""
        for value, before, compiled in zip(self.inputs, self._before, self._compiled, strict=True):
            if id(value) not in ignored and _differ(before, compiled):
                results.get(id(value), value).copy_(compiled)


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and not torch.equal(one, other)


class _Row:
    """Errors in the results for one tensor, as norms of the difference from the float64 reference.

    If there is no reference, the eager result replaces it.

    Attributes:
        kind: the kind of the tensor: weight, momentum, buffer, ...
        size: norm of the exact change.
        noise: estimated rounding error.
        errors: errors of the eager step and of the compiled code.
        digits: norm of the tensor times the machine epsilon of its dtype.
    """

    def __init__(
        self,
        name: str,
        perturbation: int,
        before: Tensor,
        eager: Tensor,
        compiled: Tensor,
        references: Sequence[Tensor | None],
    ) -> None:
        known = [each for each in references if each is not None]
        exact = known[-1] if len(known) == len(references) else eager
        self.name, self.kind, self.root = name, name.partition("'")[0], before.numel() ** 0.5
        self.size = _distance(before, exact)
        self.noise = _TOLERANCE_WITHOUT_REFERENCE / _TOLERANCE_MULTIPLE * self.size
        if exact is not eager:
            self.noise = _rounding_error(known, perturbation)
        self.errors = _distance(eager, exact), _distance(compiled, exact)
        self.digits = 0.0
        if before.is_floating_point():
            norm = float(before[before.isfinite()].double().norm())
            self.digits = torch.finfo(before.dtype).eps * norm

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
        allowed = (
            _TOLERANCE_MULTIPLE * max(self.noise, relative * self.size, noise * self.root)
            + _MIN_TOLERANCE * max(self.size, size * self.root)
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
    found: list[tuple[float, _Row]] = []
    for kind in {row.kind for row in rows}:
        same = [row for row in rows if row.kind == kind]
        known = [row for row in same if row.size and np.isfinite(row.size) and np.isfinite(row.noise)]
        numbers = [(row.noise / row.size, row.noise / row.root, row.size / row.root) for row in known]
        medians = np.median(numbers, axis=0) if numbers else [0.0] * 3
        found += [(row.excess(row.errors[compiler], medians), row) for row in same]
    excess, row = max(found, key=itemgetter(0), default=(0.0, None))
    if row is not None and excess > 1:
        size = row.size or 1.0
        raise WrongNumbersError(
            f"{row.name} changes by {row.size:.2e}, with a relative error of {row.errors[compiler] / size:.1e} against "
            f"float64; the expected rounding error is {row.noise / size:.1e}",
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


def _rounding_error(references: Sequence[Tensor], perturbation: int) -> float:
    """Estimate the rounding error of a result, as a norm.

    The references are the results of the captured graph, for weights that are perturbed by plus and minus
    `perturbation` times the machine epsilon, and in float64. A smooth function changes by opposite amounts, which are
    scaled to a perturbation of one epsilon. If a value next to zero changes its sign in a ReLU, or the maximum of a
    pooling window moves, the gradient changes by an amount that does not depend on the size of the perturbation,
    usually in only one of the two results. This changes their mean.
    """
    captured, raised, lowered, exact = references
    smooth = _distance(raised, lowered) / (2 * perturbation)
    mean = (_wide(raised) + _wide(lowered)) / 2
    return max(_distance(captured, exact), smooth, 2 * _distance(mean, exact))


def _is_trained(value: Any) -> bool:
    """Return whether a graph input is a trained tensor. Other inputs may contain class ids, which must not change."""
    return isinstance(value, Tensor) and value.requires_grad


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


def copies(inputs: Sequence[Any], double: bool = False) -> list[Any]:
    """Return the inputs of a graph with each tensor copied; if `double` is set, in float64 instead of lower precision.

    The copies have the strides and `requires_grad` of the originals. Copies of tensors that share memory also share
    memory.
    """
    tensors = {id(value): value for value in inputs if isinstance(value, Tensor)}
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    copied: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        if tensor.layout is torch.strided and not is_sharded(tensor):
            groups[tensor.untyped_storage()._cdata, tensor.dtype].append(tensor)
        else:
            copied[key] = tensor.detach().clone()
    for group in groups.values():
        start = min(int(tensor.storage_offset()) for tensor in group)
        ends = (compute_required_storage_length(t.size(), t.stride(), int(t.storage_offset())) for t in group)
        memory = torch.as_strided(group[0].detach(), (max(start, *ends) - start,), (1,), start)
        memory = memory.to(_float64_dtype(memory.dtype) if double else memory.dtype, copy=True)
        for tensor in group:
            offset = tensor.storage_offset() - start
            copied[id(tensor)] = memory.as_strided(tensor.size(), tensor.stride(), offset).detach()
    for key, tensor in tensors.items():
        copied[key].requires_grad_(tensor.requires_grad)
    return [copied.get(id(value), value) for value in inputs]


def run_captured(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a graph captured by Dynamo with torch's kernels. It may change the inputs in place."""
    return _Interpreter(graph).run(*inputs)


class _Interpreter(fx.Interpreter):
    """Runs a graph captured by Dynamo, operator by operator.

    Activation checkpointing, which does not affect the results, is ignored: it rejects changes of buffers.

    Args:
        graph: the graph.
        double: whether to ignore autocast, because the graph runs in `_InFloat64`.
    """

    def __init__(self, graph: fx.GraphModule, double: bool = False) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._autocasts = not double

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _Interpreter(args[0], not self._autocasts).run(*args[1:])
        if not self._autocasts and target is torch.amp.autocast_mode._enter_autocast:
            return None
        if not self._autocasts and target is torch.amp.autocast_mode._exit_autocast:
            return None
        return super().call_function(target, args, kwargs)


class _NanGradients(_Interpreter):
    """Runs a graph whose gradients are NaN."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = super().call_function(target, args, kwargs)
        if target is torch.autograd.grad:
            return tuple(torch.full_like(gradient, torch.nan) for gradient in results)
        return results


class _InFloat64(TorchDispatchMode):
    """Replaces lower precisions with float64 in all operators.

    Random numbers are still drawn in lower precision, because drawing them in float64 would change their values.
    """

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
