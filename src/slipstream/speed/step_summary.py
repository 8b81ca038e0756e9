"""Summarize a training step from `accelerate` as a string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slipstream.dist import get_world_size
from slipstream.step import CompiledStep

if TYPE_CHECKING:
    from slipstream.speed.accelerate import TrainStep

__all__ = ["describe_compilation", "describe_step"]


def describe_step(step: TrainStep, compilation: str, warnings: Iterable[str]) -> str:
    """Return the result of `TrainStep.summary`.

    Args:
        compilation: the result of `describe_compilation`; for a closed step, the result that `TrainStep.close` stored.
        warnings: the warnings so far.
    """
    return "\n".join(_lines(step, compilation, warnings))


def _lines(step: TrainStep, compilation: str, warnings: Iterable[str]) -> Iterator[str]:
    batches = f"{step.steps} batch{'es' if step.steps != 1 else ''}"
    by_graph = (
        f", {step.inner.batches} of them with the graph" if isinstance(step.inner, CompiledStep) else ""
    )
    yield f"step: {compilation}; trained on {batches}{by_graph}"
    if (processes := get_world_size()) > 1:
        yield f"processes: {processes}, with averaged gradients"
    enabled = {name: getattr(step.plan, name) for name in step.plan.sources}
    if enabled.get("fused", False) is None:  # None selects fused kernels if the optimizer has them
        enabled["fused"] = True
    options = [f"{name} ({step.plan.sources[name]})" for name, value in enabled.items() if value]
    yield f"options: {', '.join(options) or 'none'}"
    for name, note in step.plan.notes.items():
        yield f"  {name} is off: {note}"
    for name, reason in step.no_effect.items():
        yield f"  {name} has no effect here: {reason}"
    counts, optim = step.optim.accumulative_counts, step.optim
    if counts > 1:
        state = "complete" if optim.begins_window() else "unfinished: its gradients have not been applied"
        yield f"accumulation: {counts} batches per update; the current accumulation window is {state}"
    if step.average is not None:
        updates = int(step.average.steps)
        yield f"average: {updates} update{'' if updates == 1 else 's'}"
    for warning in dict.fromkeys(warnings):
        yield f"warning: {warning}"


def describe_compilation(step: TrainStep, closed: bool = False) -> str:
    """Return what is compiled, for the first line of the summary.

    Args:
        closed: set by `TrainStep.close`, which stores the description before it drops the graph.
    """
    inner = step.inner
    if isinstance(inner, CompiledStep) and inner.uses_graph:
        if inner.has_graph:
            return "compiled as one graph" + " until close()" * closed
        if closed:
            return "eager, because its graph was not ready before close()"
        if step.steps > 1:
            return "eager until its graph is compiled"
        return "will be compiled as one graph at the second batch"
    if (scope := step.compiled_scope) is not None:
        return f"eager, with {'a compiled model' if scope == 'model' else 'compiled blocks of the model'}"
    return "eager" if step.plan.compile is None else "eager, although compile is set"
