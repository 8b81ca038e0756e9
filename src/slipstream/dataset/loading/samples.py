"""Read samples with seeded generators, identify samples that raise errors, and replace these samples on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset, TensorDataset

from slipstream.dataset.loading.generators import IsolatedGenerators, SampleBatch, SampleIndex, hash_numbers
from slipstream.dataset.loading.reachable import find_generators
from slipstream.dataset.transforms.device_transforms import check_same_params
from slipstream.errors import DataError
from slipstream.logging import print_log


class DatasetReader(Dataset[Any]):
    """Base class of the objects through which a loader reads the samples of a map-style dataset.

    Users do not see these objects: `loader.dataset` and `get_worker_info().dataset` are the user's dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)


class TensorBatches(DatasetReader):
    """`TensorDataset` reader that indexes a whole batch at once, which is many times faster than collating samples."""

    dataset: TensorDataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        device = self.dataset.tensors[0].device
        positions = torch.tensor(indices, pin_memory=device.type not in ("cpu", "mps"))
        positions = positions.to(device, non_blocking=True)
        return [tensor[positions] for tensor in self.dataset.tensors]


class SeededDataset(DatasetReader):
    """Dataset reader that seeds the random generators for each batch.

    The global generators of Python, NumPy and torch, and the generators that the dataset and `collate` use (see
    `find_generators`), are seeded from the batch's seed before its first sample is read. Their state is restored after
    the batch is collated, so a `collate_fn` may also draw random numbers. The dataset's `set_epoch` is called before
    the first batch of an epoch, except for the epoch in which the reader is created.

    If reading a sample raises an error, a note with the sample's index is added to the error.

    Args:
        dataset: a map-style dataset.
        collate: function that returns the batch for a list of samples.
        skip_errors: maximum number of different samples that may raise an error in this process and its workers.
            A failing sample is replaced by a different one, which depends only on (seed, epoch, index).
        failed: one flag per sample, in memory shared with the workers; required if `skip_errors` is not 0.
        epoch: the current epoch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        skip_errors: int = 0,
        failed: torch.Tensor | None = None,
        epoch: int = 0,
    ) -> None:
        super().__init__(dataset)
        self.collate = collate
        self.skip_errors = skip_errors
        self._failed = failed
        self._generators = IsolatedGenerators()
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._epoch = epoch
        self._searched: int | None = None

    def __getitems__(self, indices: SampleBatch) -> Any:
        with self._generators:
            if indices.epoch != self._searched:
                self._begin_epoch(indices.epoch)
            self._generators.seed(indices.seed)
            samples = [self._get(index) for index in indices]
            try:
                check_same_params(samples)
                return self.collate(samples)
            except Exception as error:
                listed = ", ".join(map(str, indices))
                _raise(error, f"the batch of samples {listed} of {type(self.dataset).__name__}")

    def _begin_epoch(self, epoch: int) -> None:
        if self._set_epoch is not None and epoch != self._epoch:
            self._set_epoch(epoch)
        self._generators.include(find_generators(self.dataset, self.collate))
        self._epoch = self._searched = epoch

    def _get(self, index: Any) -> Any:
        if self._failed is None:
            try:
                return self.dataset[index]
            except Exception as error:
                _raise(error, f"sample {index} of {type(self.dataset).__name__}")
        for candidate in self._candidates(index):
            try:
                return self.dataset[candidate]
            except Exception as error:
                self._count_failure(candidate, error)
        raise DataError(f"every sample of {type(self.dataset).__name__} raised an error; see the log")

    def _candidates(self, index: Any) -> Iterator[Any]:
        """Yield `index`, and then all samples, starting at a position that depends on (seed, epoch, index)."""
        yield index
        seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
        first = hash_numbers((seed, epoch, int(index) % 2**64))
        for offset in range(len(self)):
            yield SampleIndex((first + offset) % len(self), seed, epoch)

    def _count_failure(self, index: int, error: Exception) -> None:
        """Count a failing sample, and raise a DataError if more than `skip_errors` samples have failed."""
        assert self._failed is not None
        already_failed = bool(self._failed[int(index)])
        self._failed[int(index)] = True
        reason = f"sample {index} of {type(self.dataset).__name__}: {type(error).__name__}: {error}"
        if (count := int(self._failed.sum())) > self.skip_errors:
            raise DataError(
                f"{count} sample{'s' * (count != 1)} raised an error, more than skip_errors={self.skip_errors}; the "
                f"last one is {reason}"
            ) from error
        if not already_failed:
            print_log(f"Skipped {reason}", "current", logging.WARNING)


def _raise(error: Exception, place: str) -> NoReturn:
    """Raise `error` with a note that states where it was raised.

    A loop would interpret `StopIteration` as the end of the data, so a different error is raised instead.
    """
    if isinstance(error, StopIteration):
        raise DataError(
            f"{place} raised StopIteration, which would end the epoch early; in the dataset, its transforms or "
            "collate_fn, find the call to next() whose iterator is exhausted"
        ) from error
    error.add_note(f"({place})")
    raise error
