"""`AveragePart`: the step part that updates a weight average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slipstream.step.numerics import HostNumber, precise_dtype
from slipstream.step.parts import StepPart

if TYPE_CHECKING:
    from slipstream.model import BaseAveragedModel

__all__ = ["AveragePart", "copy_to", "update_count"]


def update_count(batches: int, skipped: int, window: int) -> int:
    """Return the number of updates in `batches` batches, excluding those in the first `skipped` batches; at least 1.

    Args:
        window: number of batches per update.
    """
    return max(1, -(-batches // window) - max(skipped, 0) // window)


class AveragePart(StepPart):
    """Updates a weight average after each batch that counts as an update.

    With `every_batch` (as in MMEngine), every batch counts. Otherwise, only the last batch of an accumulation window
    counts.

    On the host, `before_batch` writes the weight given to the new parameters into a one-element tensor. This
    weight is 0 if the batch does not count, and otherwise the result of `average.next_weight()`: 1 for the first
    update, and for example 1 - decay for later updates. Because the weight is a tensor, a change in the decay does not
    require a new graph. `after_batch` computes `average.lerp(parameters, weight)`. A compiled step's graph contains
    this operation, unless:

    - the average has an `interval` above 1, or is on a different device than the parameters,
    - the caller sets `on_host`, or
    - the batch ends an accumulation window and the graph does not contain the optimizer's update.

    Args:
        average: the average, a `BaseAveragedModel`.
        model: the averaged model, unwrapped.
        batch_count: returns the number of completed training batches.
        ends_window: returns whether the batch with a given number (counted from 1) ends an accumulation window.
        has_begun: returns whether averaging has begun by the batch with a given number (counted from 1).
        on_host: whether to update the average outside a compiled step.
    """

    def __init__(
        self,
        average: BaseAveragedModel,
        model: nn.Module,
        batch_count: Callable[[], int],
        ends_window: Callable[[int], bool] = lambda batch: True,
        has_begun: Callable[[int], bool] = lambda batch: True,
        on_host: bool = False,
    ) -> None:
        self.average, self.model = average, model
        self._batch_count, self._ends_window, self._has_begun = batch_count, ends_window, has_begun
        averages, currents = average.pairs(model)
        self._weight = HostNumber(0.0, averages[0].device, precise_dtype(averages[0].device))
        # With an interval above 1, a graph would read and write the average even in steps that do not change it.
        self._on_other_device = any(a.device != c.device for a, c in zip(averages, currents, strict=True))
        self.on_host = on_host or average.interval > 1 or self._on_other_device
        self._due = False

    def is_due(self, batch: int) -> bool:
        """Return whether batch number `batch` (counted from 1) counts as an update."""
        if not self._has_begun(batch):
            return False
        return self.average.every_batch or self._ends_window(batch)

    def before_batch(self) -> None:
        """Set the weight of the new parameters (0 if the next batch is not an update)."""
        self._due = self.is_due(self._batch_count() + 1)
        self._weight.set(self.average.next_weight() if self._due else 0.0)

    def count_batch(self) -> None:
        """Count the batch's update of the average."""
        self.average.steps += self._due

    @torch.no_grad()
    def after_batch(self) -> None:
        """Update the average."""
        if torch.compiler.is_compiling():
            for average, current in zip(*self.average.pairs(self.model), strict=True):
                weight = self._weight.read().to(average.dtype)
                # Unlike lerp with weight 0, where() also ignores parameters that are not finite.
                average.copy_(torch.where(weight == 0, average, average.lerp(current.detach(), weight)))
        elif step_weight := self._weight.value:
            averages, currents = self.average.pairs(self.model)
            if self._on_other_device:
                currents = copy_to(averages[0].device, currents)
            try:
                torch._foreach_lerp_(averages, currents, step_weight)
            except RuntimeError:
                self.average.check_buffers(self.model)
                raise

    def state(self) -> Mapping[str, Tensor]:
        """Return the averages."""
        return {f"average[{i}]": average for i, average in enumerate(self.average.pairs(self.model)[0])}


def copy_to(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of `tensors` on `device`; if `device` is the CPU, wait once until all copies are complete."""
    copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    if device.type == "cpu" and (source := next((t.device for t in tensors if not t.is_cpu), None)):
        torch.accelerator.current_stream(source).synchronize()
    return copies
