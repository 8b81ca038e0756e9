"""The host time that a run spends in each phase: waiting for data, training step, hooks, validation and so on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

# `data`: waiting for a batch. `preprocess`: the data preprocessor, which copies the batch to the device. `step`: parts
# of the training step that are not split into `forward`, `backward` and `optimizer`, such as a step that is compiled as
# one graph. `logging`: reading the losses from the device, and writing log lines and scalars. `other`: start and end of
# a run.
Phase = Literal[
    "data", "preprocess", "forward", "backward", "optimizer", "step", "hooks", "logging",
    "validation", "test", "checkpoint", "other",
]  # fmt: skip

# The phases of training, excluding validation and checkpoints.
STEP_PHASES: tuple[Phase, ...] = (
    "data", "preprocess", "forward", "backward", "optimizer", "step", "hooks", "logging",
)  # fmt: skip


class PhaseTimes:
    """A timer that is always in exactly one phase, so the phases of a run add up to its duration.

    The timer reads the host clock and never causes a device synchronization. On an accelerator, a phase that only
    launches kernels is short, and the phase that reads their results includes the time the host waits for them.

    Attributes:
        seconds: the host time in each phase, in seconds, without the first step.
        first: the host time of the first step in each phase, in seconds. The first step is reported separately
            because it includes worker startup, memory allocation and compilation.
        steps: number of finished training steps, including the first one.
        samples: number of samples in the training steps, without the first step, summed over all processes.
        current: the current phase.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[Phase, float] = defaultdict(float)
        self.first: dict[Phase, float] = {}
        self.steps = 0
        self.samples = 0
        self.current: Phase = "other"
        self._since: float | None = None

    def start(self) -> None:
        """Start or resume the timer in the `other` phase; the time since `stop` is not counted."""
        self.current, self._since = "other", perf_counter()

    def stop(self) -> None:
        """Stop the timer until the next `start`. Until then, calls to `switch` have no effect."""
        self.switch("other")
        self._since = None

    @property
    def running(self) -> bool:
        """Whether the timer has been started."""
        return self._since is not None

    def switch(self, phase: Phase) -> None:
        """End the current phase and begin another phase."""
        if self._since is None:
            return
        now = perf_counter()
        self.seconds[self.current] += now - self._since
        self.current, self._since = phase, now

    def total(self, phase: Phase) -> float:
        """Return the total time of all completed periods in `phase`, in seconds, including the first step."""
        return self.seconds.get(phase, 0.0) + self.first.get(phase, 0.0)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Switch to `phase` inside the `with` block, then switch back; blocks may be nested."""
        before = self.current
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def end_step(self) -> None:
        """Count a training step, and switch to the `data` phase. The times of the first step are moved to `first`."""
        self.switch("data")
        self.steps += 1
        if self.steps == 1:
            self.samples = 0
            self.first = {phase: self.seconds.pop(phase) for phase in STEP_PHASES if phase in self.seconds}
