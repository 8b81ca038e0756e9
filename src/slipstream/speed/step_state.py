"""Check the state of a training step from `accelerate` before the state is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.checkpoint import ACCELERATED, check_like, check_optimizer, check_tensors
from slipstream.checkpoint import check as check_schema
from slipstream.checkpoint.matching import MismatchError
from slipstream.errors import CheckpointError

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper
    from slipstream.speed.accelerate import TrainStep

__all__ = ["check_step_state", "own_remedy"]

_REMEDY = (
    ". Load it into a step with the model, optimizer and options it was saved with, or load only the weights: "
    "model.load_state_dict(torch.load(path)['state_dict'])"
)


def check_step_state(step: TrainStep, state: Mapping[str, Any], others: list[Tensor], source: str) -> None:
    """Check that `state` belongs to `step`; see `TrainStep.check_state`.

    Args:
        others: the step's tensors that are not in the model.

    Raises:
        CheckpointError: an entry is missing, invalid, or belongs to a different model or optimizer.
    """
    check_schema(state, ACCELERATED, source)
    with own_remedy():
        check_optimizer(step.optim.optimizer, state["optimizer"], "optimizer", source)
        scaler, saved = step.optim.loss_scaler, state["optimizer"].get("loss_scaler")
        if scaler is not None and saved not in (None, {}):
            check_like(scaler.state_dict(), saved, "optimizer.loss_scaler", source)
        if step.average is not None and "average" in state:
            _check_average(step.average.state_dict(), state["average"], source)
        _check_other_tensors(others, state.get("other_tensors"), source)
        _check_gradients(step.optim, state, source)


@contextmanager
def own_remedy(remedy: str = _REMEDY) -> Iterator[None]:
    """Within the context, raise each MismatchError as a CheckpointError with `remedy` in place of its own remedy."""
    try:
        yield
    except MismatchError as error:
        raise CheckpointError(error.problem + remedy) from error


def _check_average(own: Mapping[str, Any], saved: Mapping[str, Any], source: str) -> None:
    if own.keys() != saved.keys():
        names = sorted(map(str, own.keys() ^ saved.keys()))
        raise CheckpointError(
            f"{source}: 'average' does not match the model; tensors found in only one of them: {names[:5]}"
        )
    averaged = {key: value for key, value in saved.items() if key != "steps"}
    check_tensors(own, averaged, "average", source, warnings.warn)


def _check_other_tensors(own: list[Tensor], saved: list[Tensor] | None, source: str) -> None:
    if saved is None:
        if own:
            tensors = "the tensor" if len(own) == 1 else f"the {len(own)} tensors"
            warnings.warn(
                f"{source} does not contain {tensors} outside the model that the optimizer or loss_fn uses; the "
                "current values are kept",
                stacklevel=5,
            )
        return
    if len(saved) != len(own):
        raise CheckpointError(
            f"{source}: 'other_tensors' has length {len(saved)}, but the number of tensors outside the model that "
            f"the optimizer and loss_fn use is {len(own)}; load the state of the same model, optimizer and loss_fn"
        )
    own_by_index, saved_by_index = ({str(i): t for i, t in enumerate(each)} for each in (own, saved))
    check_tensors(own_by_index, saved_by_index, "other_tensors", source, warnings.warn)


def _check_gradients(optim: OptimWrapper, state: Mapping[str, Any], source: str) -> None:
    """Check the gradients of an unfinished accumulation window."""
    params = list(optim.parameters())
    gradients = state.get("gradients", [None] * len(params))
    if len(gradients) != len(params):
        raise CheckpointError(
            f"{source}: 'gradients' has length {len(gradients)}, but the optimizer's parameter count is "
            f"{len(params)}; load the state of the same model and optimizer"
        )
    saved = {str(index): gradient for index, gradient in enumerate(gradients) if gradient is not None}
    own = {str(index): param for index, param in enumerate(params)}
    check_tensors(own, saved, "gradients", source, warnings.warn, layouts=False)
    scaled = bool(state["optimizer"].get("loss_scaler"))
    # A loss scale also scales the gradients, so scaled and unscaled gradients cannot be added.
    if saved and scaled != bool(optim.loss_scaler and optim.loss_scaler.state_dict()):
        raise CheckpointError(
            f"{source}: 'gradients' contains the gradients of an unfinished accumulation window "
            f"{'with' if scaled else 'without'} a loss scale, but the step trains {'without' if scaled else 'with'} "
            "one. Set the precision with which the state was saved ('fp16' uses a loss scale), or save when "
            "step.updated is True"
        )
