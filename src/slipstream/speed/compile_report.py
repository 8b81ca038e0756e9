"""What torch's compiler did, in lines of the user's code: breaks, recompiles and skipped CUDA graphs are said."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.step.verification import NotCapturedError, UnstableGraphError

__all__ = ["CompileReport", "CompileSummary", "explain_failure", "limit_hit"]

_ENGINE = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, slipstream))
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_LIMIT = "recompile limit exceeded"
_EXPECTED = 4
"""Recompiles of one function that a run may have: for validation, a ragged last batch, other heights, other widths."""


def explain_failure(error: BaseException) -> str:
    """Return why torch could not compile, and which line of user code it was where torch says so.

    Args:
        error: what the call of a compiled function raised.

    Returns:
        "Unsupported: Data-dependent branching, at net.py:18: `if y.sum() > 0:`".
    """
    own = NotCapturedError.inside(error) or error
    varied = next((why for record in reversed(_records()) if (why := _recompile_reason(record))), "")
    if isinstance(own, UnstableGraphError):
        return f"{own}{f'; it varied: {varied}' if varied else ''}"
    if isinstance(own, SlipstreamError):
        return str(own)
    if "consumed returned tensor's grad_fn" in str(error):
        return (
            "a module or the loss keeps a tensor with its gradient history, as the old weight_norm and spectral_norm, "
            "pruning, or a hidden state that is not detached do: detach it, or use torch.nn.utils.parametrizations"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:" says nothing without the line below it.
    reason = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1]) if lines else "no reason given"
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        reason = (
            f"{reason}: torch's limit of recompiles is reached{f'; it varied: {varied}' if varied else ''}"
        )
    where = _where(getattr(error, "real_stack", None) or ())
    return f"{type(error).__name__}: {reason}{f', at {where}' if where else ''}"


def _where(stack: Iterable[FrameSummary]) -> str:
    """Return `net.py:18: `if y.sum() > 0:`` for the innermost frame of the user's own code, or an empty string."""
    own = [frame for frame in stack if _is_users(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`" if own else ""


def _is_users(file: str) -> bool:
    """Say whether a file is neither of torch, of Slipstream, nor of Python's own library, nor generated."""
    of_python = file.startswith(_LIBRARY) and "site-packages" not in file
    return not file.startswith((*_ENGINE, "<")) and not of_python


def limit_hit(since: int) -> str:
    """Return what varied if torch, in this thread's calls since a `time.time_ns()`, reached its limit of recompiles.

    It then leaves new kinds of calls of that function to eager execution. An empty string if it did not.
    """
    for record in _records():
        if getattr(record, "start_time_us", 0) >= since // 1000 and (varied := _limit_hit(record)):
            return varied
    return ""


def _records() -> list[Any]:
    """Return what torch recorded of its latest compilations; it keeps 64."""
    records: list[Any] = torch._dynamo.utils.get_compilation_metrics()
    return records


def _limit_hit(record: Any) -> str:
    hit = _LIMIT in (getattr(record, "fail_reason", None) or "")
    return (_recompile_reason(record) or "no reason given") if hit else ""


def _recompile_reason(record: Any) -> str:
    """Return `tensor 'x' size mismatch at index 0. expected 2, actual 3`, without the number of the graph before it."""
    reason = (getattr(record, "recompile_reason", None) or "").strip().splitlines()
    return re.sub(r"^\S+/\S+: ", "", reason[0]) if reason else ""


@dataclass(frozen=True)
class CompileSummary:
    """What torch compiled between two points of this process; each dict counts a line by how often it came up."""

    graphs: int = 0
    """Graphs captured, those behind breaks and recompiles included."""
    cache_hits: int = 0
    """Pieces of code (of forward and of backward) that inductor found in its cache."""
    cache_misses: int = 0
    """Pieces that it had to make."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Where a graph broke, and why."""
    recompiles: dict[str, int] = field(default_factory=dict)
    """Which function was compiled again, and what varied."""
    unexpected: int = 0
    """Recompiles of a function beyond four: validation, a ragged last batch, other heights, other widths."""
    eager: dict[str, int] = field(default_factory=dict)
    """What varied when torch's limit of recompiles was reached: other such calls ran eagerly."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Why graphs ran without CUDA graphs although these were asked for."""

    @property
    def troubled(self) -> bool:
        """Whether there is something that costs speed: log the text as a warning then."""
        return bool(self.breaks or self.unexpected or self.eager or self.skipped)

    def text(self) -> str:
        """Return one line of counts and, if something costs speed, a line for each cause."""
        counts = [
            _count(self.graphs, "graph"),
            _count(sum(self.breaks.values()), "graph break"),
            _count(sum(self.recompiles.values()), "recompile")
            + (f" ({self.unexpected} more than expected)" if self.unexpected else ""),
            _count(sum(self.skipped.values()), "skipped CUDA graph"),
        ]
        if self.cache_hits + self.cache_misses:
            counts.append(
                f"{self.cache_hits} of {self.cache_hits + self.cache_misses} pieces of code from the cache"
            )
        lines = [f"torch.compile: {', '.join(counts)}"]
        for title, causes, shown in (
            ("graph break", self.breaks, True),
            ("recompiled", self.recompiles, self.unexpected),
            ("limit of recompiles reached, other calls ran eagerly", self.eager, True),
            ("CUDA graph skipped", self.skipped, True),
        ):
            if shown:
                lines += [f"  {title}{f' {n}x' if n > 1 else ''}: {cause}" for cause, n in causes.items()]
        return "\n".join(lines)


def _count(number: int, name: str) -> str:
    return f"{number or 'no'} {name}{'' if number == 1 else 's'}"


class CompileReport:
    """Counts what torch compiles between `start` and `finish`.

    Torch's counters belong to the process: what other models compile meanwhile is counted, too.

    Args:
        kinds: how many unlike blocks share one function (scope 'block'): each may be compiled as often.
    """

    def __init__(self, kinds: int = 1) -> None:
        self.expected = kinds - 1 + kinds * _EXPECTED
        self._started = False

    def start(self) -> None:
        """Begin to count."""
        self._started = True
        self._latest = next(iter(_records()[-1:]), None)
        self._new: list[Any] = []
        self._before = _counts()
        self._old_breaks = list(_breaks())
        # Torch keeps 64 records, so they are taken whenever it compiles.
        torch._dynamo.callback.callback_handler.register_start_callback(self._collect)

    def _collect(self, _: Any = None) -> None:
        records = _records()
        known = next((n for n in reversed(range(len(records))) if records[n] is self._latest), -1)
        self._new += records[known + 1 :]
        self._latest = next(iter(records[-1:]), None)

    def finish(self) -> CompileSummary:
        """Return what was counted since `start`, and stop counting.

        Raises:
            RuntimeError: it was not started.
        """
        if not self._started:
            raise RuntimeError("start() comes before finish()")
        self._started = False
        self._collect()
        handler = torch._dynamo.callback.callback_handler
        if self._collect in handler.start_callbacks:  # torch._dynamo.reset() forgets them
            handler.remove_start_callback(self._collect)
        counts = _counts() - self._before
        functions: Counter[str] = Counter()
        recompiles: Counter[str] = Counter()
        eager: Counter[str] = Counter()
        for record in self._new:
            if varied := _limit_hit(record):
                eager[varied] += 1
            elif reason := _recompile_reason(record):
                function = f"{record.co_filename}:{record.co_firstlineno} {record.co_name}"
                functions[function] += 1
                recompiles[f"{function}: {reason}"] += 1
        return CompileSummary(
            graphs=counts["graphs"],
            cache_hits=counts["hits"],
            cache_misses=counts["misses"],
            breaks=dict(self._new_breaks()),
            recompiles=dict(recompiles),
            unexpected=sum(max(0, n - self.expected) for n in functions.values()),
            eager=dict(eager),
            skipped=self._skips(counts["skips"]),
        )

    def _new_breaks(self) -> Counter[str]:
        old = {id(each) for each in self._old_breaks}  # not a length: torch._dynamo.reset() empties the list
        new = [each for each in _breaks() if id(each) not in old]
        return Counter(_where(each.user_stack) + ": " + each.reason.strip().splitlines()[0] for each in new)

    def _skips(self, number: int) -> dict[str, int]:
        """Return why CUDA graphs were skipped; torch counts all skips, and has reasons for those at compile time."""
        reasons = [getattr(record, "cudagraph_skip_reason", None) for record in self._new]
        known = Counter(reason.strip().splitlines()[0] for reason in reasons if reason)
        rest = number - sum(known.values())
        return {**known, **({"while running; TORCH_LOGS=cudagraphs says why": rest} if rest > 0 else {})}


def _counts() -> Counter[str]:
    counters = torch._dynamo.utils.counters
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        hits=counters["inductor"]["fxgraph_cache_hit"],
        misses=counters["inductor"]["fxgraph_cache_miss"],
        skips=counters["inductor"]["cudagraph_skips"],
    )


def _breaks() -> list[Any]:
    breaks: list[Any] = torch._dynamo.utils.graph_break_reasons
    return breaks
