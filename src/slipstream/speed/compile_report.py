"""Report torch.compile's graph breaks and recompiles, with their locations in user code."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.step.verification import NotCapturedError, UnstableGraphError

__all__ = ["CompileReport", "CompileSummary", "explain_failure", "failed_line", "limit_cause"]

_ENGINE = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, slipstream))
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_EXPECTED_RECOMPILES = 4
"""Expected number of recompiles per function: one each for validation, a smaller last batch, different heights and
different widths."""


def explain_failure(error: BaseException) -> str:
    """Return the reason why torch could not compile, with the line of user code if torch reports it.

    Args:
        error: the exception raised by the compiled function.

    Returns:
        The reason, for example "Unsupported: Data-dependent branching, at net.py:18: `if y.sum() > 0:`".
    """
    own = NotCapturedError.find_in(error) or error
    last = next(filter(None, map(_recompile_reason, reversed(_records()))), "")
    cause = f"; cause of the last recompile: {last}" if last else ""
    if isinstance(own, SlipstreamError):
        return f"{own}{cause if isinstance(own, UnstableGraphError) else ''}"
    if "consumed returned tensor's grad_fn" in str(error):
        return (
            "a module or the loss keeps a tensor that requires grad from one step to the next (for example a hidden "
            "state, or a weight computed by pruning, torch.nn.utils.weight_norm or spectral_norm); detach the tensor, "
            "or use torch.nn.utils.parametrizations"
        )
    if "appears to not have been used in the graph" in str(error):
        return "some parameters receive gradients from only some of the batches, so batches need different graphs"
    if "view size is not compatible" in str(error):
        return (
            "the backend expects other strides than torch's kernels return; with aot_eager, this happens for the "
            "gradient of dropout before transpose().contiguous(); use the backend inductor"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # After "backend='inductor' raised:", the next line contains the reason.
    reason = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1]) if lines else "no reason given"
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        reason = f"{reason}: torch's recompile limit was reached{cause}"
    line = failed_line(error)
    return f"{type(error).__name__}: {reason}{f', at {line}' if line else ''}"


def failed_line(error: BaseException) -> str:
    """Return the line of user code that torch could not compile, or an empty string if torch does not report it."""
    return _user_line(getattr(error, "real_stack", None) or ())


def _user_line(stack: Iterable[FrameSummary]) -> str:
    """Return `net.py:18: `if y.sum() > 0:`` for the innermost frame of the user's own code, or an empty string."""
    own = [frame for frame in stack if _is_user_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`" if own else ""


def _is_user_file(file: str) -> bool:
    """Return whether a file is user code: not generated, and not part of torch, Slipstream or the standard library."""
    standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not standard and not file.startswith((*_ENGINE, "<"))


def limit_cause(since: int) -> str:
    """Return the cause of the last recompile if torch has reached its recompile limit, otherwise an empty string.

    Beyond the limit, inputs that require a new graph run eagerly.

    Args:
        since: a value of `time.time_ns()`; earlier compilations are ignored.
    """
    return next(filter(None, map(_limit_cause, _records(since))), "")


def _records(since: int = 0) -> list[Any]:
    """Return torch's records of the latest compilations, from the time `since` in nanoseconds."""
    records = torch._dynamo.utils.get_compilation_metrics()
    return [record for record in records if getattr(record, "start_time_us", 0) >= since // 1000]


def _limit_cause(record: Any) -> str:
    hit = "recompile limit exceeded" in (getattr(record, "fail_reason", None) or "")
    return (_recompile_reason(record) or "no reason given") if hit else ""


def _recompile_reason(record: Any) -> str:
    """Return the reason without the graph number: `tensor 'x' size mismatch at index 0. expected 2, actual 3`."""
    reason = (getattr(record, "recompile_reason", None) or "").strip().splitlines()
    return re.sub(r"^\S+/\S+: ", "", reason[0]) if reason else ""


@dataclass(frozen=True)
class CompileSummary:
    """Statistics of torch.compile over a period of time; each dict maps a message to its number of occurrences.

    Attributes:
        graphs: number of captured graphs, including those after graph breaks and from recompiles.
        cache_hits, cache_misses: number of graphs (forward and backward) whose code was, or was not, in the cache.
        breaks: location and reason of each graph break.
        recompiles: function and cause of each recompile.
        unexpected: number of recompiles beyond those expected for each function.
        eager: cause of the last recompile of each function that reached the recompile limit and then ran eagerly.
    """

    graphs: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    breaks: Mapping[str, int] = field(default_factory=dict)
    recompiles: Mapping[str, int] = field(default_factory=dict)
    unexpected: int = 0
    eager: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_problems(self) -> bool:
        """Whether anything in the report reduces speed. If so, `text()` should be logged as a warning."""
        return bool(self.breaks or self.unexpected or self.eager)

    def text(self) -> str:
        """Return one line of counts and one line for each cause of reduced speed."""
        more = f" ({self.unexpected} more than expected)" if self.unexpected else ""
        graphs = self.cache_hits + self.cache_misses
        counts = [
            _count(self.graphs, "graph"),
            _count(sum(self.breaks.values()), "graph break"),
            _count(sum(self.recompiles.values()), "recompile") + more,
            *([f"{self.cache_hits} of {graphs} compiled graphs from the cache"] if graphs else []),
        ]
        lines = [f"torch.compile: {', '.join(counts)}"]
        for title, causes in (
            ("graph break", self.breaks),
            ("recompiled", self.recompiles if self.unexpected else {}),
            ("recompile limit reached, so later calls ran eagerly", self.eager),
        ):
            lines += [f"  {title}{f' {n}x' if n > 1 else ''}: {cause}" for cause, n in causes.items()]
        return "\n".join(lines)


def _count(number: int, name: str) -> str:
    return f"{number or 'no'} {name}{'' if number == 1 else 's'}"


class CompileReport:
    """Counts torch's compilations between `start` and `finish`, including those of other models in this process."""

    @contextmanager
    def logging(self, logger: Any) -> Iterator[None]:
        """Context manager that logs the statistics of the compilations within the context."""
        self.start()
        try:
            yield
        finally:  # count torch's compilations until the context ends
            summary = self.finish()
        (logger.warning if summary.has_problems else logger.info)(summary.text())

    def start(self) -> None:
        """Start counting."""
        # By default, torch keeps only 64 records.
        torch._dynamo.utils.set_compilation_metrics_limit(10_000)
        self._since, self._before = time.time_ns(), _counts()
        self._old_breaks = list(torch._dynamo.utils.graph_break_reasons)

    def finish(self) -> CompileSummary:
        """Return the statistics since `start`."""
        counts = _counts() - self._before
        functions: Counter[str] = Counter()
        recompiles: Counter[str] = Counter()
        eager: Counter[str] = Counter()
        for record in _records(self._since):
            if recompile_cause := _limit_cause(record):
                eager[recompile_cause] += 1
            elif reason := _recompile_reason(record):
                function = f"{record.co_filename}:{record.co_firstlineno} {record.co_name}"
                functions[function] += 1
                recompiles[f"{function}: {reason}"] += 1
        # Compare objects, not lengths, because torch._dynamo.reset() clears the list.
        old = set(map(id, self._old_breaks))
        breaks = Counter(
            f"{_user_line(each.user_stack)}: {each.reason.strip().splitlines()[0]}"
            for each in torch._dynamo.utils.graph_break_reasons
            if id(each) not in old
        )
        unexpected = sum(max(0, n - _EXPECTED_RECOMPILES) for n in functions.values())
        graphs, hits, misses = (counts[name] for name in ("graphs", "hits", "misses"))
        return CompileSummary(graphs, hits, misses, breaks, recompiles, unexpected, eager)


def _counts() -> Counter[str]:
    counters = torch._dynamo.utils.counters
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        hits=counters["inductor"]["fxgraph_cache_hit"],
        misses=counters["inductor"]["fxgraph_cache_miss"],
    )
