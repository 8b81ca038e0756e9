"""Record, in memory shared with the workers, the samples that were replaced because they raised an error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import get_worker_info

__all__ = ["Replacements"]

_MIN_EPOCHS = 8
"""Number of epochs whose replacements are stored, unless this would require more than `_MAX_ROWS` rows."""
_MAX_ROWS = 4096


class Replacements:
    """The samples that were replaced in recent epochs.

    Each process writes only to its own rows, so no lock is required. If all rows of a process are full, the process
    overwrites the oldest row.

    Args:
        samples: maximum number of different samples that can be replaced.
        workers: number of worker processes.
    """

    def __init__(self, samples: int, workers: int) -> None:
        self._rows = min(_MIN_EPOCHS * samples, _MAX_ROWS)
        # Row 0 of each process contains the number of rows written. Each other row is (epoch + 1, index, replacement).
        self._table = torch.zeros(workers + 1, self._rows + 1, 3, dtype=torch.int64).share_memory_()

    def add(self, epoch: int, index: int, replacement: int) -> None:
        """Record that sample `replacement` was used in place of sample `index`."""
        worker = get_worker_info()
        table = self._table[0 if worker is None else (worker.id + 1) % len(self._table)]
        count = int(table[0, 0])
        row = table[1 + count % self._rows]
        row[0] = 0  # another process must not read a partially written row
        row[1:] = torch.tensor([index, replacement])
        row[0] = epoch + 1
        table[0, 0] = count + 1

    def resolve(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """Return `indices`, substituting the replacement's index for each sample that was replaced in this epoch."""
        rows = self._table[:, 1:].reshape(-1, 3)
        replacements = {index: other for _, index, other in rows[rows[:, 0] == epoch + 1].tolist()}
        return [replacements.get(int(index), int(index)) for index in indices]
