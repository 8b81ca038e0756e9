"""The arithmetic of accumulation windows: which batches end a window, and how many batches it contains."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AccumulationWindow"]


@dataclass
class AccumulationWindow:
    """Counts batches, and determines where accumulation windows begin and end.

    A window contains `size` batches. It also ends with the last batch of the run and, if `batches_per_epoch` is set,
    with the last batch of each epoch, so such windows can be smaller.
    """

    counts: int = 1
    """Number of batches per window."""
    total: int = -1
    """Total number of batches of the run, or -1 if it is unknown."""
    batches_per_epoch: int | None = None
    """Number of batches per epoch if windows end at the end of each epoch; otherwise None."""
    count: int = 0
    """Number of batches trained on, including those before resuming."""
    start: int = 0
    """Value of `count` at the end of the last window."""

    def ends(self, count: int) -> bool:
        """Return whether batch number `count` (counted from 1) ends a window."""
        in_epoch = count % self.batches_per_epoch if self.batches_per_epoch else count
        return in_epoch % self.counts == 0 or count == self.total

    def advance(self) -> None:
        """Count a batch."""
        self.count += 1
        if self.counts == 1 or self.ends(self.count):
            self.start = self.count

    @property
    def size(self) -> int:
        """Number of batches in the window that contains the next batch."""
        if self.counts == 1 and self.start == self.count:
            return 1
        in_epoch = self.count % self.batches_per_epoch if self.batches_per_epoch else self.count
        first = self.count - in_epoch  # the first batch of the epoch
        ends = [first + in_epoch - in_epoch % self.counts + self.counts]
        if self.batches_per_epoch:
            ends.append(first + self.batches_per_epoch)
        if self.total > self.count:
            ends.append(self.total)
        return min(ends) - self.start

    @property
    def position(self) -> tuple[int, int]:
        """`count` and `start`."""
        return self.count, self.start

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        self.count, self.start = position

    @property
    def unfinished(self) -> int:
        """Number of batches since the end of the last window.

        If a run ends with a smaller window and is then extended, the next window is also smaller than `counts`.
        Therefore, this value cannot be inferred from the number of completed batches, and checkpoints contain it.
        """
        return self.count - self.start

    def move_to(self, count: int, has_gradients: bool) -> None:
        """Continue after `count` batches; if there are gradients, in the middle of a window where one is open."""
        self.count = self.start = count
        if has_gradients and not self.ends(count):
            in_epoch = count % self.batches_per_epoch if self.batches_per_epoch else count
            self.start = count - in_epoch % self.counts
