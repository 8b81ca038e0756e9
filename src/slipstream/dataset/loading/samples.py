"""Read samples with seeded generators, identify samples that raise errors, and replace these samples on request."""

from __future__ import annotations

import bisect
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import IsolatedGenerators, hash_numbers, seed_generators
from slipstream.dataset.loading.replacements import Replacements
from slipstream.dataset.loading.sample_index import SampleIndex
from slipstream.dataset.transforms.device_transforms import check_same_params
from slipstream.errors import DataError
from slipstream.logging import print_log

__all__ = ["SeededDataset", "describe_sample", "skipped_samples"]

_LIST_ATTRIBUTES = ("image_paths", "data_list", "samples", "imgs", "images", "img_files", "files", "paths")
"""Attributes in which datasets store one entry per sample."""
_PATH_KEYS = ("img_path", "image_path", "file_path", "file_name", "filename", "path", "file", "image")
_LOOKS_LIKE_A_FILE = re.compile(r"[^\n]{1,500}\.\w{1,6}")
_MAX_LISTED_INDICES = 10
"""Maximum number of indices listed in a message."""


class SeededDataset(Dataset[Any]):
    """Dataset wrapper that seeds the global generators of Python, NumPy and torch for each sample.

    The generators are seeded from (seed, epoch, index) before each sample. Their state is restored after the batch
    is collated, so a `collate_fn` may also draw random numbers. All other attributes are read from `dataset`.

    If reading a sample raises an error, a note with the sample's index and, if known, its file is added to the error.

    Args:
        dataset: a map-style dataset.
        collate: function that returns the batch for a list of samples.
        skip_errors: maximum number of different samples that may raise an error in this process and its workers.
            A failing sample is replaced by a different one, which depends only on (seed, epoch, index).
        workers: number of worker processes.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], skip_errors: int = 0, workers: int = 0
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.skip_errors = skip_errors
        # One flag per sample, in shared memory: the workers set the flags, and the training process reads them.
        self.failed = torch.zeros(len(dataset), dtype=torch.bool).share_memory_() if skip_errors else None
        self._replacements = Replacements(skip_errors, workers) if skip_errors else None
        self._generators = IsolatedGenerators()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # unpickling accesses `dataset` before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def resolve_replacements(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """Return `indices`, substituting the replacement's index for each sample that was replaced in this epoch."""
        return list(indices) if self._replacements is None else self._replacements.resolve(epoch, indices)

    def __getitem__(self, index: Any) -> Any:
        with self._generators:
            return self._get(index)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._generators:
            samples = [self._get(index) for index in indices]
            try:
                check_same_params(samples)
                return self.collate(samples)
            except Exception as error:
                _raise(
                    error, f"the batch of samples {_join_indices(indices)} of {type(self.dataset).__name__}"
                )

    def _get(self, index: Any) -> Any:
        try:
            return self._read(index)
        except Exception as error:
            if self.failed is None or not hasattr(index, "__index__"):
                _raise(error, describe_sample(self.dataset, index))
            self._count_failure(index, error)
        for other in self._replacement_indices(index):
            try:
                sample = self._read(other)
            except Exception as error:
                self._count_failure(other, error)
                continue
            assert self._replacements is not None
            self._replacements.add(other.epoch, int(index), int(other))
            return sample
        raise DataError(
            f"every sample of {type(self.dataset).__name__} raised an error; see the warnings in the log"
        )

    def _read(self, index: Any) -> Any:
        if hasattr(index, "__index__"):  # a key that is not an integer cannot seed the generators
            seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
            seed_generators((seed, epoch, int(index) % 2**64))
        return self.dataset[index]

    def _replacement_indices(self, index: int) -> Iterator[SampleIndex]:
        """Yield the indices of all samples, starting at a position that depends on (seed, epoch, index)."""
        seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
        first = hash_numbers((seed, epoch, int(index) % 2**64))
        for offset in range(len(self)):
            yield SampleIndex((first + offset) % len(self), seed, epoch)

    def _count_failure(self, index: int, error: Exception) -> None:
        """Count a failing sample, and raise a DataError if more than `skip_errors` samples have failed."""
        assert self.failed is not None
        already_failed = bool(self.failed[int(index)])
        self.failed[int(index)] = True
        reason = f"{describe_sample(self.dataset, index)}: {type(error).__name__}: {error}"
        if (count := int(self.failed.sum())) > self.skip_errors:
            raise DataError(
                f"{count} sample{'s' * (count != 1)} raised an error, more than skip_errors={self.skip_errors}; the "
                f"last one is {reason}"
            ) from error
        if not already_failed:
            print_log(f"Skipped {reason}", "current", logging.WARNING)


def skipped_samples(dataset: Any) -> str:
    """Return a description of the samples that a loader's dataset has skipped, or an empty string if there are none."""
    failed = getattr(dataset, "failed", None) if isinstance(dataset, SeededDataset) else None
    indices = [] if failed is None else failed.nonzero()[:, 0].tolist()
    return f"{len(indices)} of {len(dataset)} samples: {_join_indices(indices)}" if indices else ""


def describe_sample(dataset: Any, index: Any) -> str:
    """Return a description such as `sample 3 of ImageFolder ('cats/b.png')`. The file is omitted if it is unknown."""
    with contextlib.suppress(Exception):  # user code, which may fail
        if file := _file(dataset, index):
            return f"sample {index} of {type(dataset).__name__} ('{file}')"
    return f"sample {index} of {type(dataset).__name__}"


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


def _join_indices(indices: Sequence[Any]) -> str:
    text = ", ".join(str(index) for index in indices[:_MAX_LISTED_INDICES])
    return f"{text}, ..." if len(indices) > _MAX_LISTED_INDICES else text


def _file(dataset: Any, index: Any) -> str | None:
    """Return the file of a sample, or None if it is unknown."""
    if (inner := _inner(dataset, index)) is not None:
        return _file(*inner)
    for name in _LIST_ATTRIBUTES:
        entries = getattr(dataset, name, None)
        if isinstance(entries, Sequence) and (path := _path(entries[index])):
            return path
    return _path(dataset.get_data_info(int(index))) if hasattr(dataset, "get_data_info") else None


def _inner(dataset: Any, index: int) -> tuple[Any, int] | None:
    """Return the wrapped dataset and the index in it if `dataset` is a wrapper, or None otherwise.

    Wrappers from torch and from this package are supported.
    """
    if hasattr(dataset, "cumulative_sizes"):
        dataset_index = bisect.bisect_right(dataset.cumulative_sizes, index)
        start = dataset.cumulative_sizes[dataset_index - 1] if dataset_index else 0
        return dataset.datasets[dataset_index], index - start
    if not hasattr(dataset, "dataset"):
        return None
    for name in ("indices", "repeat_indices"):
        if hasattr(dataset, name):
            return dataset.dataset, int(getattr(dataset, name)[index])
    return dataset.dataset, int(index) % len(dataset.dataset)


def _path(entry: Any) -> str | None:
    """Return the path in a sample's entry, or None if it contains no path.

    The entry may be a path, a dict with a path, or a list or tuple that begins with a path.
    """
    if isinstance(entry, Mapping):
        entry = next((entry[key] for key in _PATH_KEYS if key in entry), None)
    elif isinstance(entry, tuple | list) and entry:
        entry = entry[0]
    if isinstance(entry, Path):
        return str(entry)
    return entry if isinstance(entry, str) and _LOOKS_LIKE_A_FILE.fullmatch(entry) else None
