"""Data loaders whose order and augmentation depend on (seed, epoch, index) alone."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from slipstream.dataset.base import SegmentationDataset
from slipstream.dataset.collate import default_collate
from slipstream.dataset.fashion_mnist import FashionMNIST
from slipstream.dataset.samplers import DefaultSampler, EpochBatchSampler, InfiniteSampler, check_not_empty
from slipstream.dist import get_world_size
from slipstream.errors import BuildError, ConfigError, did_you_mean
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS

__all__ = ["SeededDataset", "batch_size", "build_dataloader", "is_infinite", "set_epoch"]

# These draw nothing from the global generators: they need no seed for each sample.
_PURE = (TensorDataset, SegmentationDataset, FashionMNIST)


def build_dataloader(
    cfg: Mapping[str, Any] | DataLoader[Any], seed: int, name: str, training: bool
) -> DataLoader[Any]:
    """Build a data loader from MMEngine's configuration, or take over a ready one.

    Args:
        cfg: `dataset`, `sampler`, `batch_sampler`, `collate_fn` (each an object or a configuration) and
            the arguments of `torch.utils.data.DataLoader`; or a `DataLoader`.
        seed: the run's seed; it fixes order and augmentation whatever the number of workers.
        name: what errors call it (`train_dataloader`).
        training: whether ranks must get equally many samples (they are then padded).

    Raises:
        ConfigError: an unknown or missing key.
        DataError: the data set is empty.
    """
    if isinstance(cfg, DataLoader):
        check_not_empty(cfg.dataset, name)
        return _take_over(cfg, seed)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"must be a DataLoader or a dict, not {type(cfg).__name__}", name)
    options = dict(cfg)
    _check_keys(options, name)
    dataset = _dataset(options.pop("dataset"), name)
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, **_collate(options, name))
    batches = _batch_sampler(options, dataset, seed, name, training)
    return _loader(dataset, batches, seed, _collate(options, name))


def set_epoch(loader: DataLoader[Any], epoch: int, start: int = 0) -> None:
    """Choose the epoch that the loader's next iteration delivers, and the batch at which it starts."""
    if isinstance(loader.batch_sampler, EpochBatchSampler):
        loader.batch_sampler.set_epoch(epoch, start)
    elif hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Return how many samples a batch has, None where only the loader's own batch sampler knows."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    size: int | None = getattr(batches, "batch_size", loader.batch_size)
    return size


def is_infinite(loader: DataLoader[Any]) -> bool:
    """Say whether the loader's stream never ends."""
    batches = getattr(loader.batch_sampler, "batch_sampler", None)
    return isinstance(getattr(batches, "sampler", None), InfiniteSampler)


class SeededDataset(Dataset[Any]):
    """A data set whose use of Python's, NumPy's and torch's global generators depends on the sample alone.

    Before each sample the three generators are seeded from (seed, epoch, index); in the training process
    itself (no workers) their states are put back after each batch. Attributes are those of the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # asked while unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        with _restored_generators():
            return [self._get(index) for index in indices]

    def _get(self, index: int) -> Any:
        seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
        words = np.random.SeedSequence((seed, epoch, int(index))).generate_state(1)
        random.seed(int(words[0]))
        np.random.seed(int(words[0]))
        torch.default_generator.manual_seed(int(words[0]))
        return self.dataset[index]


class TensorBatches(Dataset[Any]):
    """A `TensorDataset` whose batches are indexed at once: what collating its samples gives, many times faster."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        positions = torch.tensor(indices)
        return [tensor[positions] for tensor in self.dataset.tensors]


@contextmanager
def _restored_generators() -> Iterator[None]:
    if torch.utils.data.get_worker_info() is not None:  # a worker's own generators serve nobody else
        yield
        return
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


def _check_keys(options: Mapping[str, Any], name: str) -> None:
    known = [*inspect.signature(DataLoader).parameters, "num_batch_per_epoch"]
    for key in options:
        if key not in known:
            raise ConfigError(f"a data loader has no option '{key}'{did_you_mean(key, known)}", name)
    if "dataset" not in options:
        raise ConfigError("needs a 'dataset'", name)
    if not isinstance(options.get("batch_size", 1), int) or options.get("batch_size", 1) < 1:
        raise ConfigError(
            f"must be a whole number of at least 1, not {options['batch_size']!r}", f"{name}.batch_size"
        )


def _dataset(cfg: Any, name: str) -> Any:
    dataset = DATASETS.build(cfg) if isinstance(cfg, Mapping) else cfg
    if hasattr(dataset, "full_init"):  # OpenMMLab's data sets may be built lazily
        dataset.full_init()
    check_not_empty(dataset, name)
    return dataset


def _batch_sampler(options: dict[str, Any], dataset: Any, seed: int, name: str, training: bool) -> Any:
    shuffle = options.pop("shuffle", False)
    sampler = options.pop("sampler", None) or {"type": "DefaultSampler", "shuffle": shuffle}
    defaults = {"dataset": dataset, "seed": seed}
    if isinstance(sampler, Mapping):
        if sampler.get("type") in ("DefaultSampler", DefaultSampler):
            defaults["round_up"] = training
        sampler = DATA_SAMPLERS.build(sampler, default_args=_accepted(sampler, defaults))
    batch_sampler = options.pop("batch_sampler", None)
    batch_size, drop_last = options.pop("batch_size", 1), options.pop("drop_last", False)
    if isinstance(batch_sampler, Mapping):
        return DATA_SAMPLERS.build(batch_sampler, default_args={"sampler": sampler, "batch_size": batch_size})
    if (per_epoch := options.pop("num_batch_per_epoch", None)) is not None:
        sampler = _Cut(sampler, per_epoch * batch_size)
    return batch_sampler or BatchSampler(sampler, batch_size, drop_last)


class _Cut(Sampler[int]):
    """The first samples of another sampler (`num_batch_per_epoch`)."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler, self.count = sampler, count

    def __iter__(self) -> Iterator[int]:
        for _, index in zip(range(self.count), self.sampler, strict=False):
            yield index

    def __len__(self) -> int:
        return min(self.count, len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def _accepted(sampler: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return those defaults that the sampler's constructor takes; torch's name the data set otherwise."""
    kind = sampler.get("type")
    target = DATA_SAMPLERS.resolve(kind) if isinstance(kind, str) else kind
    known = inspect.signature(target).parameters  # type: ignore[arg-type]
    if "data_source" in known:
        defaults = {**defaults, "data_source": defaults["dataset"]}
    return {key: value for key, value in defaults.items() if key in known}


def _collate(options: dict[str, Any], name: str) -> dict[str, Any]:
    collate = options.get("collate_fn", {"type": "default_collate"})
    if isinstance(collate, str):
        collate = {"type": collate}
    if isinstance(collate, Mapping):
        rest = {key: value for key, value in collate.items() if key != "type"}
        kind = collate.get("type")
        if kind is None:
            raise BuildError("needs a 'type'", f"{name}.collate_fn")
        function = FUNCTIONS.resolve(kind) if isinstance(kind, str) else kind
        collate = partial(function, **rest) if rest else function
    return {**options, "collate_fn": collate}


def _loader(dataset: Any, batch_sampler: Any, seed: int, options: dict[str, Any]) -> DataLoader[Any]:
    share = math.ceil(len(dataset) / get_world_size())
    batches = EpochBatchSampler(batch_sampler, seed, share, stamp=not isinstance(dataset, TensorDataset))
    if type(dataset) is TensorDataset and options.get("collate_fn") is default_collate:
        dataset, options = TensorBatches(dataset), {**options, "collate_fn": _as_it_is}
    elif not isinstance(dataset, _PURE):
        dataset = SeededDataset(dataset)
    if not options.get("num_workers"):
        options = {k: v for k, v in options.items() if k not in ("persistent_workers", "prefetch_factor")}
    options.setdefault("pin_memory", torch.accelerator.is_available())
    # Without a generator of its own, each new iterator would draw from the model's random stream.
    options.setdefault("generator", torch.Generator().manual_seed(seed))
    return DataLoader(dataset, batch_sampler=batches, **options)


def _as_it_is(batch: Any) -> Any:
    return batch


def _take_over(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader like `loader` whose order depends on the seed and that can start anywhere."""
    batches = loader.batch_sampler
    if (
        isinstance(loader.dataset, IterableDataset)
        or batches is None
        or isinstance(batches, EpochBatchSampler)
    ):
        return loader
    sampler: Any = getattr(batches, "sampler", None)
    if hasattr(sampler, "generator") and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    options = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return _loader(loader.dataset, batches, seed, options)
