"""Verify a compiled step before it is used, without a side effect: on copies, against float64.

One batch is computed three times on copies of everything that the graph reads: by the compiled code, by torch's own
kernels from the captured graph, and in float64. The batch itself is trained eagerly, once. How far the captured graph
in its own precision is from float64 is the rounding error of this network; compiled code and eager step may be a small
multiple of it away. If the eager step is further away, the captured graph lacks something that the eager step does; if
the compiled code is, the compiler is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from slipstream.errors import SlipstreamError
from slipstream.step.reference import copies, interpret

__all__ = [
    "Captured",
    "Compiled",
    "NotCapturedError",
    "OnlyEagerError",
    "UnstableGraphError",
    "Verification",
    "WrongNumbersError",
]

_MULTIPLE = 4.0
"""How many times the rounding error of the captured graph a result may be away from float64."""
_FLOOR = 3e-5
"""Relative errors below this are rounding in any network."""
_WITHOUT_REFERENCE = 0.2
"""The relative error that is tolerated where float64 cannot be computed."""


class NotCapturedError(SlipstreamError, RuntimeError):
    """A step cannot stay one graph, although torch could capture it here and now."""

    @staticmethod
    def inside(error: BaseException) -> NotCapturedError | None:
        """Return the error of this kind that torch wraps in its own when a backend raises it, or that it is."""
        candidates = (error, getattr(error, "inner_exception", None), error.__cause__)
        return next((each for each in candidates if isinstance(each, NotCapturedError)), None)


class OnlyEagerError(NotCapturedError):
    """No part of a step may be compiled: the compiler would change its numbers."""


class UnstableGraphError(OnlyEagerError):
    """Steps would have to be captured again and again, since a value that a graph holds fixed changes."""


class WrongNumbersError(SlipstreamError, RuntimeError):
    """A compiled step does not compute what the eager step computes.

    Args:
        message: the tensor, and how far it is off.
        compiler: whether the captured graph is right, and the code that the compiler made of it is not.
    """

    def __init__(self, message: str, compiler: bool) -> None:
        super().__init__(message)
        self.compiler = compiler


class Captured(BaseException):  # not an error, and no `except Exception` of a user may stop it
    """A step has been captured and compiled, but not run: it must be verified with this batch first."""

    def __init__(self, compiled: Compiled, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.compiled, self.inputs = compiled, inputs
        self.held: list[Tensor] = []
        """The gradients of the accumulation window among the inputs."""


class Compiled:
    """The code that a compiler made of a captured graph; it runs only after it was verified.

    Args:
        graph: the captured graph.
        run: the compiled code.
        verified: whether it may run at once.
        has_side_effects: whether Dynamo changes Python objects after the code has run.
    """

    def __init__(
        self, graph: fx.GraphModule, run: Callable[..., Any], verified: bool, has_side_effects: bool = True
    ) -> None:
        self.graph, self.run, self.verified = graph, run, verified
        self.has_side_effects = has_side_effects
        self.running = False
        """Whether an exception comes from the code itself: tensors may have been changed."""
        self.guards: Any = None
        """Dynamo's guard manager."""
        self.last: tuple[tuple[Any, ...], Sequence[Any]] | None = None
        """Inputs and outputs of the last call that went Dynamo's way."""

    def __call__(self, *inputs: Any) -> Any:
        """Run the code, or raise `Captured`."""
        if not self.verified:
            raise Captured(self, inputs)
        outputs = self.call(inputs)
        self.last = inputs, outputs
        return outputs

    def call(self, inputs: Sequence[Any]) -> Any:
        """Run the code, which is verified."""
        self.running = True
        outputs = self.run(*inputs)
        self.running = False
        return outputs


class Verification:
    """The results of a captured step on copies, before the batch is trained eagerly.

    Everything is kept in host memory.

    Args:
        captured: the step and its inputs for one batch.
        device: where the step runs.
        names: names of the tensors among the inputs, for messages.

    Raises:
        Exception: whatever the compiled code raises.
    """

    def __init__(self, captured: Captured, device: torch.device, names: Mapping[int, str]) -> None:
        self.inputs = captured.inputs
        self.names = names
        self._device = device
        graph = captured.compiled.graph
        self._before = _values(self.inputs)
        own = copies(self.inputs)
        with self._forked():
            captured.compiled.run(*own)
        self._compiled = _values(own)
        self._captured = self._interpreted(graph, double=False)
        self._exact = self._interpreted(graph, double=True)

    def _interpreted(self, graph: fx.GraphModule, double: bool) -> list[Tensor | None] | None:
        """Return the results of the captured graph by torch's own kernels; None if they cannot be had."""
        own = copies(self.inputs, torch.float64 if double else None)
        try:
            if not double and _is_double(self.inputs):
                # There is no higher precision: disturb the last digit instead.
                own = [_disturbed(value) for value in own]
            with self._forked():
                interpret(graph, own, double)
        except Exception:  # an operator without float64, or one that only a compiler can run
            return None
        return _values(own)

    @contextmanager
    def _forked(self) -> Iterator[None]:
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            yield

    def compare(
        self, results: Mapping[int, Tensor], updated: Collection[int], ignored: Collection[int]
    ) -> bool:
        """Compare with what the eager step has made of the inputs.

        Args:
            results: by the id of an input, the result of the eager step where it is not in the input itself.
            updated: ids of the inputs that the update of the captured step changes.
            ignored: ids of the inputs that the eager step changes after what is captured.

        Returns:
            Whether an update was seen: none is if the loss scale overflows.

        Raises:
            WrongNumbersError: the eager step or the compiled code is too far from float64.
        """
        eager = _values(
            [results.get(id(value), value) if isinstance(value, Tensor) else value for value in self.inputs]
        )
        rows = [_Row.of(*columns) for columns in self._columns(eager) if columns[0] not in ignored]
        if not any(row.key in updated and row.moved for row in rows):
            return False
        typical = {
            kind: _Typical.of([row for row in rows if row.kind == kind]) for kind in {r.kind for r in rows}
        }
        for compiler in (False, True):
            excess, worst = max(
                ((row.excess(compiler, typical[row.kind]), row) for row in rows), key=itemgetter(0)
            )
            if excess > 1:
                raise WrongNumbersError(worst.message(compiler), compiler)
        return True

    @torch.no_grad()
    def take(self, results: Mapping[int, Tensor], ignored: Collection[int]) -> None:
        """Let the compiled step's numbers count, so that they do not depend on when a graph was verified."""
        for value, before, compiled in zip(self.inputs, self._before, self._compiled, strict=True):
            if before is not None and compiled is not None and id(value) not in ignored:
                target = results.get(id(value), value)
                if not torch.equal(before, compiled):
                    target.copy_(compiled)

    def _columns(self, eager: Sequence[Tensor | None]) -> Iterator[tuple[Any, ...]]:
        unknown = [None] * len(eager)
        seen: set[int] = set()
        for value, before, *columns in zip(
            self.inputs,
            self._before,
            eager,
            self._compiled,
            self._captured or unknown,
            self._exact or unknown,
            strict=True,
        ):
            if before is not None and id(value) not in seen:
                seen.add(id(value))
                yield (id(value), self.names.get(id(value), "an input"), before, *columns)


@dataclass(frozen=True)
class _Row:
    """How far the results for one tensor are from the exact one, as norms."""

    key: int
    name: str
    elements: int
    size: float
    """Of the exact change."""
    moved: bool
    """Whether the captured graph changes the tensor."""
    noise: float
    eager: float
    compiled: float
    digits: float
    """What the last digits of the tensor's values amount to."""

    @classmethod
    def of(
        cls,
        key: int,
        name: str,
        before: Tensor,
        eager: Tensor,
        compiled: Tensor,
        captured: Tensor | None,
        exact: Tensor | None,
    ) -> _Row:
        """Compare results; without an exact one, the eager result stands for it."""
        if captured is None or exact is None:
            captured, exact, known = eager, eager, False
        else:
            known = True
        size = _distance(before, exact)
        return cls(
            key,
            name,
            before.numel(),
            size=size,
            moved=not torch.equal(before, exact if before.dtype == torch.float64 else captured),
            noise=_distance(captured, exact) if known else _WITHOUT_REFERENCE / _MULTIPLE * size,
            eager=_distance(eager, exact),
            compiled=_distance(compiled, exact),
            digits=torch.finfo(before.dtype).eps * float(before[before.isfinite()].double().norm())
            if before.is_floating_point()
            else 0.0,
        )

    @property
    def kind(self) -> str:
        """What is comparable: weights, momenta, buffers."""
        return self.name.partition("'")[0]

    def excess(self, compiler: bool, typical: _Typical) -> float:
        """Return a distance as a multiple of what is tolerated; NaN is infinitely far."""
        distance = self.compiled if compiler else self.eager
        if not np.isfinite(self.noise):  # overflows, as it may in lower precision
            return 0.0
        root = self.elements**0.5
        noise = max(self.noise, typical.relative * self.size, typical.noise * root)
        allowed = _MULTIPLE * noise + _FLOOR * max(self.size, typical.size * root) + 4 * self.digits
        if not np.isfinite(distance) or not np.isfinite(allowed) or not allowed:
            return float("inf") if distance else 0.0
        return float(distance / allowed)

    def message(self, compiler: bool) -> str:
        """Return what is off, for people."""
        distance, size = self.compiled if compiler else self.eager, self.size or 1.0
        return (
            f"{self.name} changes by {self.size:.2e}, and the result is {distance / size:.1e} of that away from the "
            f"one in float64, where rounding explains {self.noise / size:.1e}"
        )


@dataclass(frozen=True)
class _Typical:
    """Medians over all tensors of a kind: a single one may be exact by chance, or have no gradient but rounding."""

    relative: float
    """Of the rounding error over the change."""
    noise: float
    """Of the rounding error of an element."""
    size: float
    """Of the change of an element."""

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> _Typical:
        finite = [row for row in rows if row.size and np.isfinite(row.size) and np.isfinite(row.noise)]
        if not finite:
            return cls(0.0, 0.0, 0.0)
        return cls(
            relative=float(np.median([row.noise / row.size for row in finite])),
            noise=float(np.median([row.noise / row.elements**0.5 for row in finite])),
            size=float(np.median([row.size / row.elements**0.5 for row in finite])),
        )


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = _wide(one), _wide(other)
    return float(torch.where(one == other, 0.0, one - other).norm())  # infinities may be equal


def _wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _values(tensors: Sequence[Any]) -> list[Tensor | None]:
    """Return copies of the tensors in host memory, None in the place of everything else."""
    return [value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else None for value in tensors]


def _is_double(inputs: Sequence[Any]) -> bool:
    """Say whether what is trained is float64 already."""
    trained = (value for value in inputs if isinstance(value, Tensor) and value.requires_grad)
    return any(value.dtype == torch.float64 for value in trained)


@torch.no_grad()
def _disturbed(value: Any) -> Any:
    """Change the last digit of each number, up or down."""
    if isinstance(value, Tensor) and value.is_floating_point():
        generator = torch.Generator().manual_seed(0)  # the global one must not move
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        value.mul_(1 + torch.finfo(value.dtype).eps * signs.to(value.device))
    return value
