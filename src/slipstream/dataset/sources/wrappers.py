"""Datasets that wrap other datasets and pass on the seed and epoch of a `SampleIndex`."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import ConcatDataset as TorchConcatDataset
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import SampleIndex
from slipstream.dataset.loading.streaming import as_map_style
from slipstream.dataset.sources.base import check_index
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

_Source: TypeAlias = Dataset[Any] | Mapping[str, Any]


@DATASETS.register_module()
class ConcatDataset(TorchConcatDataset[Any]):
    """Concatenation of datasets. Its `metainfo` is that of the first dataset.

    Args:
        datasets: datasets, or dicts from which `DATASETS` builds them.
        ignore_keys: keys of `metainfo` whose values may differ between datasets.

    Raises:
        DataError: the `metainfo` of two datasets differs.
    """

    def __init__(self, datasets: Sequence[_Source], ignore_keys: str | Sequence[str] = ()) -> None:
        if not datasets:
            raise ConfigError("ConcatDataset requires at least one dataset")
        super().__init__([_build(dataset) for dataset in datasets])
        ignored = {ignore_keys} if isinstance(ignore_keys, str) else set(ignore_keys)
        self.metainfo = _metainfo(self.datasets[0])
        for position, dataset in enumerate(self.datasets[1:], start=1):
            _check_same(self.metainfo, _metainfo(dataset), ignored, position)

    def __getitem__(self, idx: int) -> Any:
        dataset_index, local = self._locate(idx)
        return self.datasets[dataset_index][_inner_index(idx, local)]

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the class ids that occur in sample `idx`."""
        dataset_index, local = self._locate(idx)
        return _cat_ids(self.datasets[dataset_index], local)

    def _locate(self, idx: int) -> tuple[int, int]:
        """Return the position of the dataset that contains sample `idx`, and the index within that dataset."""
        check_index(self, idx)
        dataset_index = bisect.bisect_right(self.cumulative_sizes, idx)
        return dataset_index, int(idx) - (self.cumulative_sizes[dataset_index - 1] if dataset_index else 0)


@DATASETS.register_module()
class RepeatDataset(Dataset[Any]):
    """A dataset repeated `times` times in each epoch.

    This is useful for small datasets, because starting an epoch is expensive. Each repeat of a sample is augmented
    differently: repeat r in epoch e uses the epoch number `e * times + r`.

    Args:
        dataset: a dataset, or a dict from which `DATASETS` builds it.
        times: number of repeats.
    """

    def __init__(self, dataset: _Source, times: int) -> None:
        if times < 1:
            raise ConfigError(f"times must be at least 1, got {times}")
        self.dataset = _build(dataset)
        self.times = times
        self.metainfo = _metainfo(self.dataset)

    def __len__(self) -> int:
        return self.times * len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        check_index(self, idx)
        repeat, local = divmod(int(idx), len(self.dataset))
        return self.dataset[_inner_index(idx, local, repeat, self.times)]

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the class ids that occur in sample `idx`."""
        return _cat_ids(self.dataset, int(idx) % len(self.dataset))


@DATASETS.register_module()
class AtLeast(RepeatDataset):
    """A dataset repeated until an epoch has at least `min_samples` samples.

    Args:
        dataset: a dataset, or a dict from which `DATASETS` builds it.
        min_samples: minimum number of samples in an epoch.
    """

    def __init__(self, dataset: _Source, min_samples: int) -> None:
        if min_samples < 1:
            raise ConfigError(f"must be at least 1, got {min_samples}", "min_samples")
        built = _build(dataset)
        super().__init__(built, math.ceil(min_samples / max(1, len(built))))


@DATASETS.register_module()
class ClassBalancedDataset(Dataset[Any]):
    """A dataset that repeats samples with rare classes (Gupta et al. 2019, LVIS).

    Let f(c) be the fraction of samples that contain class c, and t the threshold. Each sample then occurs
    `ceil(max over its classes c of max(1, sqrt(t / f(c))))` times per epoch. Repeats are consecutive and augmented
    differently.

    Args:
        dataset: a dataset with `get_cat_ids(index)`, which returns the class ids of a sample, or a dict from which
            `DATASETS` builds it. The method is called once per sample when the wrapper is built.
        oversample_thr: the threshold t; samples whose classes all have f(c) >= t are not repeated.

    Raises:
        DataError: the dataset has no `get_cat_ids`.
    """

    def __init__(self, dataset: _Source, oversample_thr: float) -> None:
        self.dataset = _build(dataset)
        self.oversample_thr = oversample_thr
        self.metainfo = _metainfo(self.dataset)
        factors = self._repeat_factors()
        self.repeat_indices = [i for i, factor in enumerate(factors) for _ in range(math.ceil(factor))]
        self._copies = [copy for factor in factors for copy in range(math.ceil(factor))]
        self._max_copies = math.ceil(max(factors, default=1.0))

    def __len__(self) -> int:
        return len(self.repeat_indices)

    def __getitem__(self, idx: int) -> Any:
        check_index(self, idx)
        return self.dataset[_inner_index(idx, self.repeat_indices[idx], self._copies[idx], self._max_copies)]

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the class ids that occur in sample `idx`."""
        return _cat_ids(self.dataset, self.repeat_indices[idx])

    def _repeat_factors(self) -> list[float]:
        classes = [set(_cat_ids(self.dataset, i)) for i in range(len(self.dataset))]
        samples_with = Counter(c for ids in classes for c in ids)
        frequency = {c: n / len(classes) for c, n in samples_with.items()}
        factor = {c: max(1.0, math.sqrt(self.oversample_thr / f)) for c, f in frequency.items()}
        return [max((factor[c] for c in ids), default=1.0) for ids in classes]


def _build(dataset: _Source) -> Any:
    return as_map_style(DATASETS.build(dataset) if isinstance(dataset, Mapping) else dataset)


def _metainfo(dataset: Any) -> dict[str, Any]:
    return dict(getattr(dataset, "metainfo", {}))


def _cat_ids(dataset: Any, index: int) -> list[int]:
    if not hasattr(dataset, "get_cat_ids"):
        raise DataError(f"{type(dataset).__name__} does not define get_cat_ids(index)")
    return list(dataset.get_cat_ids(index))


def _inner_index(index: int, inner: int, repeat: int = 0, times: int = 1) -> SampleIndex:
    """Return a `SampleIndex` for `inner` with the seed of `index`; each repeat gets its own epoch number."""
    epoch = getattr(index, "epoch", 0) * times + repeat
    return SampleIndex(inner, getattr(index, "seed", 0), epoch)


def _check_same(first: dict[str, Any], other: dict[str, Any], ignored: set[str], position: int) -> None:
    for key in sorted((first.keys() | other.keys()) - ignored):
        first_value, other_value = first.get(key), other.get(key)
        # Tuples, lists and arrays with the same values are considered equal.
        if not np.array_equal(first_value, other_value):  # type: ignore[arg-type]
            raise DataError(
                f"metainfo['{key}'] of datasets 0 and {position} differs: {first_value!r} and {other_value!r}; if this "
                f"is correct, pass ignore_keys=['{key}']"
            )
