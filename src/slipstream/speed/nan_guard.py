"""Speed option: skip the step or stop if a loss or gradient is not finite, without a sync in every step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from slipstream.errors import NonFiniteLossError
from slipstream.optim import OptimWrapper
from slipstream.step.parts import StepPart
from slipstream.typecheck import PositiveInt, check

__all__ = ["NanGuardOptions", "SkipNonFinite"]


@dataclass(frozen=True)
class NanGuardOptions:
    """Options of `nan_guard=dict(...)`, which handles losses and gradients that are not finite; a string sets `action`.

    Without this option, a non-finite loss still stops a Runner the next time it reads losses for logging.
    """

    shorthand: ClassVar = "action"

    action: Literal["stop", "skip"] = "stop"
    """`stop` ends the run the next time losses are read for logging. `skip` skips the step without updating weights."""
    max_skipped: PositiveInt = 50
    """Maximum number of consecutive skipped steps (`skip`). If the limit is exceeded, the run stops."""

    def __post_init__(self) -> None:
        check(self.max_skipped, PositiveInt, "max_skipped")

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart | None:
        """Return the step part that skips updates, or None for `stop`, for which a Runner reads the losses."""
        if self.action == "stop":
            return None
        guard = SkipNonFinite(model, next(optim.parameters()).device, self.max_skipped)
        guard.reads_itself = True
        return guard


class SkipNonFinite(StepPart):
    """Skips the update of an accumulation window in which a loss or gradient, on any rank, is not finite.

    A skipped update does not change weights, optimizer state or the model's buffers (BatchNorm statistics). With a loss
    scale, an overflow is such an update as well, and decreases the scale.

    Args:
        model: the model, unwrapped.
        device: device of the gradients.
        max_skipped: maximum number of consecutive skipped updates; the next `read` raises an error if there are more.
    """

    nonfinite: Tensor
    reads_itself = (
        False  # whether the part calls `read` every `max_skipped` batches; in a Runner, its hook does
    )

    def __init__(self, model: nn.Module, device: torch.device, max_skipped: PositiveInt = 50) -> None:
        # The number of updates skipped since the last `read`, and the number of consecutive skipped updates.
        self.skips = torch.zeros(2, dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros(1, device=device)
        self.max_skipped = max_skipped
        self._model, self._batches = model, 0
        # Copies of the model's buffers, by dtype and device: their names, and one tensor with their values. Many small
        # buffers are then copied with a few kernels.
        self._saved: list[tuple[list[str], Tensor]] = []

    def before_batch(self) -> None:
        """Copy the model's buffers at the start of an accumulation window."""
        if not self._saved:
            buffers = dict(self._model.named_buffers())
            kinds: dict[Any, list[str]] = {}
            for name, buffer in buffers.items():
                if torch._debug_has_internal_overlap(buffer) != 1:  # expanded buffers cannot change in place
                    kinds.setdefault((buffer.dtype, buffer.device), []).append(name)
            self._saved = [(names, _flat(buffers[name] for name in names)) for names in kinds.values()]

    def after_loss(self, loss: Tensor) -> None:
        """Record whether the loss is finite."""
        self.nonfinite.add_((~torch.isfinite(loss.detach())).to(self.nonfinite))

    @torch.no_grad()
    def after_window(self, finite: Tensor | None) -> None:
        """Restore the model's buffers if `finite` is False, and count the update."""
        assert finite is not None, "nonfinite is set"
        current = dict(self._model.named_buffers())  # forward may have assigned new tensors
        for names, before in self._saved:
            buffers = [current[name] for name in names]
            values = torch.where(finite.to(before.device), _flat(buffers), before)
            torch._foreach_copy_(buffers, list(_unflatten_dense_tensors(values, buffers)))
        self._saved = []
        self.nonfinite.zero_()
        skipped = (~finite).to(torch.int64)
        total, consecutive = self.skips.unbind()
        self.skips.copy_(torch.stack([total + skipped, (consecutive + 1) * skipped]))

    def count_batch(self) -> None:
        """Read the number of skipped updates after every `max_skipped` batches, unless a Runner reads it."""
        self._batches += 1
        if self.reads_itself and self._batches % self.max_skipped == 0 and (skipped := self.read()):
            logging.getLogger("slipstream").warning(
                f"Skipped {skipped} update{'s' if skipped > 1 else ''} with a non-finite loss or gradient in the last "
                f"{self.max_skipped} batches"
            )

    def state(self) -> Mapping[str, Tensor]:
        """Return the flag that a step sets."""
        return {"whether a loss was not finite": self.nonfinite}

    def read(self) -> int:
        """Return the number of skipped updates since the last call. This synchronizes with the device.

        Raises:
            NonFiniteLossError: more than `max_skipped` consecutive updates were skipped.
        """
        total, consecutive = self.skips.tolist()
        self.skips[0] = 0
        if consecutive > self.max_skipped:
            steps = "last step was" if consecutive == 1 else f"last {consecutive} steps were"
            raise NonFiniteLossError(
                f"the {steps} skipped because the loss or a gradient was NaN or infinite. "
                f"nan_guard allows at most {self.max_skipped} in a row (max_skipped). Lower the learning rate, add a "
                "warm-up, or check the data for NaN or wrong labels"
            )
        return int(total)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
