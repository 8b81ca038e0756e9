"""Check, save, load and summarize a training step from `accelerate`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.checkpoint import (
    ACCELERATED,
    ACCELERATED_FILE,
    check,
    check_like,
    check_optimizer,
    check_restorable,
    check_tensors,
    get_random_state,
    load_checkpoint,
    set_random_state,
    write_checkpoint,
)
from slipstream.checkpoint.matching import MismatchError
from slipstream.checkpoint.weights import compare_weights
from slipstream.dist import all_gather_object, get_rank, get_world_size
from slipstream.errors import CheckpointError
from slipstream.model import unwrap_model
from slipstream.step import CompiledStep

if TYPE_CHECKING:
    from slipstream.speed.accelerate import TrainStep

__all__ = ["check_step_state", "describe_compilation", "describe_step", "load_step", "save_step"]

_REMEDY = (
    ". Load it into a step with the model, optimizer and options it was saved with, or load only the weights: "
    "model.load_state_dict(torch.load(path)['state_dict'])"
)


# ---- state --------------------------------------------------------------------------------------------


def check_step_state(step: TrainStep, state: Mapping[str, Any], others: list[Tensor], source: str) -> None:
    """Check that `state` belongs to `step`; see `TrainStep.check_state`.

    Args:
        others: the step's tensors that are not in the model.

    Raises:
        CheckpointError: an entry is missing, invalid, or belongs to a different model or optimizer.
    """
    check(state, ACCELERATED, source)
    optim, params = step.optim, list(step.optim.parameters())
    with _own_remedy():
        check_optimizer(optim.optimizer, state["optimizer"], "optimizer", source)
        scaler, saved = optim.loss_scaler, state["optimizer"].get("loss_scaler")
        if scaler is not None and saved not in (None, {}):
            check_like(scaler.state_dict(), saved, "optimizer.loss_scaler", source)
        if step.average is not None and "average" in state:
            own = step.average.state_dict()
            _check_entries("average", own, state["average"], source)
            averaged = {key: value for key, value in state["average"].items() if key != "steps"}
            check_tensors(own, averaged, "average", source, warnings.warn)
        _check_list("other_tensors", others, state.get("other_tensors", []), source)
        if "gradients" in state:
            _check_list("gradients", params, state["gradients"], source, layouts=False)
            scaled = bool(saved)
            if any(gradient is not None for gradient in state["gradients"]) and scaled != bool(
                scaler and scaler.state_dict()
            ):
                raise CheckpointError(
                    f"{source}: 'gradients' contains the gradients of an unfinished accumulation window "
                    f"{'with' if scaled else 'without'} a loss scale, but the step trains "
                    f"{'without' if scaled else 'with'} one; set the precision with which the state was saved, or save "
                    "when step.updated is True"
                )


def _check_list(
    key: str, own: list[Any], saved: list[Tensor | None], source: str, layouts: bool = True
) -> None:
    """Check the tensors in a list; None marks a missing gradient."""
    names = {str(i): tensor for i, tensor in enumerate(own)}
    entries = {str(i): tensor for i, tensor in enumerate(saved)}
    _check_entries(key, names, entries, source)
    tensors = {name: tensor for name, tensor in entries.items() if tensor is not None}
    check_tensors(names, tensors, key, source, warnings.warn, layouts=layouts)


def _check_entries(key: str, own: Mapping[str, Any], saved: Mapping[str, Any], source: str) -> None:
    if own.keys() != saved.keys():
        names = sorted(map(str, own.keys() ^ saved.keys()))
        raise CheckpointError(
            f"{source}: '{key}' does not match the model, optimizer and loss_fn; entries found in only one of them: "
            f"{names[:5]}"
        )


@contextmanager
def _own_remedy(remedy: str = _REMEDY) -> Iterator[None]:
    """Within the context, raise each MismatchError as a CheckpointError with `remedy` in place of its own remedy."""
    try:
        yield
    except MismatchError as error:
        raise CheckpointError(error.problem + remedy) from error


def save_step(step: TrainStep, path: str | Path, values: Mapping[str, Any]) -> None:
    """Write the model, the step, the random states and `values` to `path`; see `TrainStep.save`."""
    if get_world_size() > 1 and not step.optim.begins_window():
        raise CheckpointError(
            "an accumulation window is unfinished, and each process has its own gradients; save when the window ends "
            "(step.updated is True)"
        )
    state = unwrap_model(step.model).state_dict()
    check_restorable(state)
    content = {
        "state_dict": state,
        "step": step.state_dict(),
        "random_state": all_gather_object(get_random_state()),
        "values": dict(values),
    }
    write_checkpoint(content, Path(path), _refuse)


def load_step(step: TrainStep, path: str | Path) -> dict[str, Any]:
    """Load a file written by `save_step`, and return `values`; see `TrainStep.load`."""
    source = str(path)
    content = load_checkpoint(path)
    check(content, ACCELERATED_FILE, source)
    model = unwrap_model(step.model)
    with _own_remedy(". Load it into a step that uses the same model"):
        compare_weights(model, content["state_dict"], True, source)
    step.check_state(content["step"], source)
    model.load_state_dict(content["state_dict"])
    step.load_state_dict(content["step"])
    states = content.get("random_state") or []
    if get_rank() < len(states):
        set_random_state(states[get_rank()])
    return dict(content.get("values", {}))


def _refuse(message: str) -> None:
    raise CheckpointError(message.replace("checkpoint.", "", 1))


# ---- summary ------------------------------------------------------------------------------------------


def describe_step(step: TrainStep, compilation: str, messages: Iterable[str]) -> Iterator[str]:
    """Yield the lines of `TrainStep.summary`, given the result of `describe_compilation` and the warnings so far."""
    plan, optim = step.plan, step.optim
    by_graph = (
        f", {step.inner.batches} of them with the graph" if isinstance(step.inner, CompiledStep) else ""
    )
    yield f"step: {compilation}; trained on {_count(step.steps, 'batch', 'batches')}{by_graph}"
    if (processes := get_world_size()) > 1:
        yield f"processes: {processes}, with averaged gradients"
    # The value None of `fused` selects fused kernels if the optimizer has them.
    enabled = [
        name for name in plan.sources if getattr(plan, name) or (name == "fused" and plan.fused is None)
    ]
    yield f"options: {', '.join(f'{name} ({plan.sources[name]})' for name in enabled) or 'none'}"
    yield from (f"  {name} is off: {note}" for name, note in plan.notes.items())
    yield from (f"  {name} has no effect here: {reason}" for name, reason in step.no_effect.items())
    if (counts := optim.accumulative_counts) > 1:
        state = "complete" if optim.begins_window() else "unfinished: its gradients have not been applied"
        yield f"accumulation: {counts} batches per update; the current accumulation window is {state}"
    if step.average is not None:
        yield f"average: {_count(int(step.average.steps), 'update', 'updates')}"
    yield from (f"warning: {message}" for message in dict.fromkeys(messages))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def describe_compilation(step: TrainStep, closed: bool = False) -> str:
    """Return what is compiled; `closed` is set by `TrainStep.close`, which then drops the graph."""
    inner = step.inner
    if isinstance(inner, CompiledStep) and inner.uses_graph:
        if inner.has_graph:
            return "compiled as one graph" + " until close()" * closed
        if closed:
            return "eager, because its graph was not ready before close()"
        return "will be compiled as one graph at the second batch"
    if (scope := step.compiled_scope) is not None:
        return f"eager, with {'a compiled model' if scope == 'model' else 'compiled blocks of the model'}"
    return "eager" if step.plan.compile is None else "eager, although compile is set"
