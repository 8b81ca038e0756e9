"""Report torch.compile's graph breaks and recompiles, with their locations in user code."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.step.verification import NotCapturedError, UnstableGraphError

__all__ = ["CompileReport", "explain_failure", "failed_line", "limit_cause"]

_ENGINE = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, slipstream))
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
# Expected number of recompiles per function: one each for validation, a smaller last batch, different heights and
# different widths.
_EXPECTED_RECOMPILES = 4


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
    return [record for record in records if (record.start_time_us or 0) >= since // 1000]


def _limit_cause(record: Any) -> str:
    hit = "recompile limit exceeded" in (record.fail_reason or "")
    return (_recompile_reason(record) or "no reason given") if hit else ""


def _recompile_reason(record: Any) -> str:
    """Return the reason without the graph number: `tensor 'x' size mismatch at index 0. expected 2, actual 3`."""
    reason = (record.recompile_reason or "").strip().splitlines()
    return re.sub(r"^\S+/\S+: ", "", reason[0]) if reason else ""


class CompileReport:
    """Torch's compilations in this process, including those of other models, since this object was created."""

    def __init__(self) -> None:
        # By default, torch keeps only 64 records.
        torch._dynamo.utils.set_compilation_metrics_limit(10_000)
        self._since, self._before = time.time_ns(), _counts()
        self._old_breaks = list(torch._dynamo.utils.graph_break_reasons)

    def log(self, logger: Any) -> None:
        """Log `lines`, as a warning if anything reduced the speed."""
        lines = self.lines()
        (logger.warning if len(lines) > 1 else logger.info)("\n".join(lines))

    def lines(self) -> list[str]:
        """Return one line of counts, and one line for each cause of reduced speed.

        These are graph breaks, the recompiles of a function if there are more of them than expected, and functions that
        reached the recompile limit and then ran eagerly.
        """
        # Compare objects, not lengths, because torch._dynamo.reset() clears the list.
        old = set(map(id, self._old_breaks))
        breaks = [each for each in torch._dynamo.utils.graph_break_reasons if id(each) not in old]
        causes = Counter(
            f"graph break: {_user_line(each.user_stack)}: {each.reason.strip().splitlines()[0]}"
            for each in breaks
        )
        records = _records(self._since)
        recompiled = [record for record in records if _recompile_reason(record) and not _limit_cause(record)]
        functions = Counter(map(_function, recompiled))
        unexpected = sum(max(0, n - _EXPECTED_RECOMPILES) for n in functions.values())
        causes.update(
            f"recompiled: {_function(record)}: {_recompile_reason(record)}"
            for record in recompiled
            if functions[_function(record)] > _EXPECTED_RECOMPILES
        )
        limit = "recompile limit reached, so later calls ran eagerly"
        causes.update(f"{limit}: {cause}" for cause in map(_limit_cause, records) if cause)
        counts = _counts() - self._before
        compiled = counts["hits"] + counts["misses"]  # forward and backward graphs
        texts = [
            _count(counts["graphs"], "graph"),
            _count(len(breaks), "graph break"),
            _count(len(recompiled), "recompile") + f" ({unexpected} more than expected)" * bool(unexpected),
            *([f"{counts['hits']} of {compiled} compiled graphs from the cache"] if compiled else []),
        ]
        problems = (f"  {cause}{f' ({n} times)' if n > 1 else ''}" for cause, n in causes.items())
        return [f"torch.compile: {', '.join(texts)}", *problems]


def _function(record: Any) -> str:
    return f"{record.co_filename}:{record.co_firstlineno} {record.co_name}"


def _count(number: int, name: str) -> str:
    return f"{number or 'no'} {name}{'' if number == 1 else 's'}"


def _counts() -> Counter[str]:
    counters = torch._dynamo.utils.counters
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        hits=counters["inductor"]["fxgraph_cache_hit"],
        misses=counters["inductor"]["fxgraph_cache_miss"],
    )
