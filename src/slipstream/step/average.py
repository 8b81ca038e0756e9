"""Keep an average of the weights: the part of a step that decides when an update is due, and makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.step.numerics import Scalar, precise_dtype
from slipstream.step.parts import StepPart

__all__ = ["AveragePart"]


class _Average(Protocol):
    """What `slipstream.model.BaseAveragedModel` offers."""

    interval: int
    steps: int
    """How many updates were counted."""

    @property
    def every_batch(self) -> bool:
        """Whether a batch that does not end an accumulation window counts as an update."""

    def next_weight(self) -> float:
        """Count an update and return the weight of the current parameters."""

    def pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return averages and what is averaged, in the same order."""


class AveragePart(StepPart):
    """Update an average of the weights after each batch for which one is due.

    An average that counts every batch (`every_batch`, MMEngine's) is due after each; others at the end of each
    accumulation window. The weight of the new parameters is a 0-dim tensor, so a decay that grows needs no new graph.

    Args:
        average: the average, a `BaseAveragedModel`.
        model: the model that is averaged, unwrapped.
        done: returns how many batches have been trained before the coming one.
        window: number of batches in an accumulation window.
        total: number of batches of the whole training, None if unknown; the last one ends a smaller window.
        begun: says for the number of a batch, from 1, whether averaging has begun.
    """

    def __init__(
        self,
        average: _Average,
        model: nn.Module,
        done: Callable[[], int],
        window: int = 1,
        total: int | None = None,
        begun: Callable[[int], bool] = lambda batch: True,
    ) -> None:
        self.average, self.model = average, model
        self._done, self._window, self._total, self._begun = done, window, total, begun
        averages, currents = average.pairs(model)
        self._weight = Scalar(0.0, averages[0].device, precise_dtype(averages[0].device))
        # An average that is seldom due would otherwise be read and written in vain.
        elsewhere = any(a.device != c.device for a, c in zip(averages, currents, strict=True))
        self.on_host = average.interval > 1 or elsewhere
        self._counted = (0, 0)

    def is_due(self, batch: int) -> bool:
        """Say whether batch number `batch`, from 1, counts as an update."""
        if not self._begun(batch):
            return False
        return self.average.every_batch or batch % self._window == 0 or batch == self._total

    def before_batch(self) -> None:
        """Count the coming batch if it is due, and let the step read the weight of its parameters."""
        batch = self._done() + 1
        if self._counted == (batch, self.average.steps):  # the batch was counted, and then failed
            self.average.steps -= 1
        due = self.is_due(batch)
        self._weight.set(self.average.next_weight() if due else 0.0)
        self._counted = (batch, self.average.steps) if due else (0, 0)

    @torch.no_grad()
    def after_batch(self) -> None:
        """Move the average towards the parameters."""
        if torch.compiler.is_compiling():
            for average, current in zip(*self.average.pairs(self.model), strict=True):
                average.lerp_(current.detach(), self._weight.read().to(average.dtype))
        elif weight := self._weight.value:
            averages, currents = self.average.pairs(self.model)
            currents = [c.to(a.device) for a, c in zip(averages, currents, strict=True)]
            torch._foreach_lerp_(averages, currents, weight)

    def state(self) -> Mapping[str, Tensor]:
        """Return the averages."""
        return {f"average[{i}]": average for i, average in enumerate(self.average.pairs(self.model)[0])}
