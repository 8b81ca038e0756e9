"""Data loaders whose order and augmentation depend only on (seed, epoch, index)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from slipstream.dataset.loading.collate import default_collate
from slipstream.dataset.loading.generators import IsolatedGenerators, seed_generators
from slipstream.dataset.loading.samplers import (
    DefaultSampler,
    EpochBatchSampler,
    InfiniteSampler,
    check_not_empty,
)
from slipstream.dataset.loading.workers import check_workers, with_workers
from slipstream.dataset.transforms.device_transforms import check_same_params
from slipstream.dist import get_world_size
from slipstream.errors import BuildError, ConfigError, DataError, did_you_mean
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS

__all__ = ["SeededDataset", "batch_size", "build_dataloader", "is_infinite", "length", "set_epoch"]


def build_dataloader(
    cfg: Mapping[str, Any] | DataLoader[Any], seed: int, name: str, training: bool
) -> DataLoader[Any]:
    """Build a data loader from a configuration in MMEngine's format, or wrap an existing `DataLoader`.

    Args:
        cfg: A dict with `dataset`, `sampler`, `batch_sampler`, `collate_fn` (each an object or a configuration)
            and the arguments of `torch.utils.data.DataLoader`; `num_workers` and `prefetch_factor` may be `auto`
            (see `with_workers`). Alternatively, a `DataLoader`, or `dict(dataloader=..., num_batch_per_epoch=...)`
            to limit its number of batches per epoch.
        seed: Seed of the run; it determines the order and the augmentation for any number of workers.
        name: Name of the loader in error messages (such as `train_dataloader`).
        training: Whether all ranks must get the same number of samples; if so, some samples may be repeated.

    Raises:
        ConfigError: A key is unknown or missing.
        DataError: The dataset is empty, or `drop_last` is set and the dataset is smaller than one batch.
    """
    limit = None
    if isinstance(cfg, Mapping) and isinstance(ready := cfg.get("dataloader"), DataLoader):
        limit, cfg = _limit(cfg, name), ready
    if isinstance(cfg, DataLoader):
        check_not_empty(cfg.dataset, name)
        return _check_has_batches(_wrap_loader(cfg, seed, training, limit), name, training)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"must be a DataLoader or a dict, got {type(cfg).__name__}", name)
    options = dict(cfg)
    _check_keys(options, name)
    dataset = _dataset(options.pop("dataset"), name)
    check_workers(options, name, streamed=isinstance(dataset, IterableDataset))
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, **_defaults(_collate(options, name), seed))
    batches = _batch_sampler(options, dataset, seed, training)
    return _check_has_batches(_loader(dataset, batches, seed, _collate(options, name), name), name, training)


def set_epoch(loader: DataLoader[Any], epoch: int, start: int = 0) -> None:
    """Set the epoch of the next iteration over the loader, and the batch at which it starts."""
    if isinstance(loader.batch_sampler, EpochBatchSampler):
        loader.batch_sampler.set_epoch(epoch, start)
    elif hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples per batch, or None if a custom batch sampler determines it."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    size: int | None = getattr(batches, "batch_size", loader.batch_size)
    return size


def length(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches per epoch, or None for an iterable dataset without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def is_infinite(loader: DataLoader[Any]) -> bool:
    """Return whether an iteration over the loader never ends."""
    return isinstance(loader.batch_sampler, EpochBatchSampler) and loader.batch_sampler.endless


class SeededDataset(Dataset[Any]):
    """Dataset wrapper that seeds the global generators of Python, NumPy and torch for each sample.

    The generators are seeded from (seed, epoch, index) before each sample. Their state is restored after the batch
    is collated, so a `collate_fn` may also draw random numbers. Other attributes are read from the dataset.

    Args:
        dataset: A map-style dataset.
        collate: Function that returns the batch for a list of samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self._generators = IsolatedGenerators()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # unpickling reads it before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: Any) -> Any:
        with self._generators:
            return self._get(index)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._generators:
            samples = [self._get(index) for index in indices]
            check_same_params(samples)
            return self.collate(samples)

    def _get(self, index: Any) -> Any:
        if hasattr(index, "__index__"):  # a key that is not an integer cannot seed the generators
            seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
            seed_generators((seed, epoch, int(index) % 2**64))
        return self.dataset[index]


class TensorBatches(Dataset[Any]):
    """Wrapper of a `TensorDataset` that indexes a whole batch at once; collating samples is many times slower."""

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
        device = self.dataset.tensors[0].device
        positions = torch.tensor(indices, pin_memory=device.type not in ("cpu", "mps"))
        positions = positions.to(device, non_blocking=True)
        return [tensor[positions] for tensor in self.dataset.tensors]


def _limit(cfg: Mapping[str, Any], name: str) -> int | None:
    """Return the maximum number of batches per epoch for a dict that contains a `DataLoader`."""
    if other := sorted(set(cfg) - {"dataloader", "num_batch_per_epoch"}):
        raise ConfigError(f"'{other[0]}' cannot be changed for an existing DataLoader; remove this key", name)
    limit: int | None = cfg.get("num_batch_per_epoch")
    _check_limit(limit, name)
    ready = cfg["dataloader"]
    if limit is not None and (isinstance(ready.dataset, IterableDataset) or ready.batch_sampler is None):
        raise ConfigError(
            "requires a DataLoader with a batch sampler; remove this option", f"{name}.num_batch_per_epoch"
        )
    return limit


def _check_limit(limit: int | None, name: str) -> None:
    if limit is not None and limit < 1:
        raise ConfigError("must be at least 1", f"{name}.num_batch_per_epoch")


def _check_keys(options: Mapping[str, Any], name: str) -> None:
    known = [*inspect.signature(DataLoader).parameters, "num_batch_per_epoch"]
    for key in options:
        if key not in known:
            raise ConfigError(f"a data loader has no option '{key}'{did_you_mean(key, known)}", name)
    if "dataset" not in options:
        raise ConfigError("the key 'dataset' is missing", name)
    if not isinstance(options.get("batch_size", 1), int) or options.get("batch_size", 1) < 1:
        raise ConfigError(
            f"must be an integer of at least 1, got {options['batch_size']!r}", f"{name}.batch_size"
        )
    _check_limit(options.get("num_batch_per_epoch"), name)


def _dataset(cfg: Any, name: str) -> Any:
    dataset = DATASETS.build(cfg) if isinstance(cfg, Mapping) else cfg
    if hasattr(dataset, "full_init"):  # datasets of OpenMMLab may be initialized lazily
        dataset.full_init()
    check_not_empty(dataset, name)
    return dataset


def _batch_sampler(options: dict[str, Any], dataset: Any, seed: int, training: bool) -> Any:
    shuffle = options.pop("shuffle", False)
    sampler = options.pop("sampler", None) or {"type": "DefaultSampler", "shuffle": shuffle}
    if isinstance(sampler, Mapping):
        defaults = {"dataset": dataset, "data_source": dataset, "seed": seed, "round_up": training}
        sampler = DATA_SAMPLERS.build(sampler, default_args=_accepted_defaults(sampler, defaults))
    batch_sampler = options.pop("batch_sampler", None)
    batch_size, drop_last = options.pop("batch_size", 1), options.pop("drop_last", False)
    if isinstance(batch_sampler, Mapping):
        return DATA_SAMPLERS.build(batch_sampler, default_args={"sampler": sampler, "batch_size": batch_size})
    return batch_sampler or BatchSampler(sampler, batch_size, drop_last)


def _accepted_defaults(sampler: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that the sampler's constructor accepts; torch's samplers take `data_source`."""
    kind = sampler.get("type")
    if kind is None:
        return {}  # the registry raises the error
    target = DATA_SAMPLERS.resolve(kind) if isinstance(kind, str) else kind
    known = inspect.signature(target).parameters
    return {key: value for key, value in defaults.items() if key in known}


def _collate(options: dict[str, Any], name: str) -> dict[str, Any]:
    collate = options.get("collate_fn", {"type": "default_collate"})
    if isinstance(collate, str):
        collate = {"type": collate}
    if isinstance(collate, Mapping):
        rest = {key: value for key, value in collate.items() if key != "type"}
        kind = collate.get("type")
        if kind is None:
            raise BuildError("the key 'type' is missing", f"{name}.collate_fn")
        function = FUNCTIONS.resolve(kind) if isinstance(kind, str) else kind
        collate = partial(function, **rest) if rest else function
    return {**options, "collate_fn": collate}


def _loader(
    dataset: Any, batch_sampler: Any, seed: int, options: dict[str, Any], name: str = ""
) -> DataLoader[Any]:
    collate, limit = options["collate_fn"], options.pop("num_batch_per_epoch", None)
    tensors = type(dataset) is TensorDataset and collate is default_collate
    samples = _samples_per_pass(dataset, batch_sampler)
    batches = EpochBatchSampler(batch_sampler, seed, samples, stamp=not tensors, limit=limit)
    if tensors:
        if any(tensor.device.type != "cpu" for tensor in dataset.tensors):
            options["pin_memory"] = False  # only CPU memory can be pinned
        dataset, options["collate_fn"] = TensorBatches(dataset), _identity
    elif collate is not default_collate or not getattr(dataset, "draws_nothing_global", False):
        dataset, options["collate_fn"] = SeededDataset(dataset, collate), _identity
    options = with_workers(options, dataset, batches, name)
    return DataLoader(dataset, batch_sampler=batches, **_defaults(options, seed))


def _check_has_batches(loader: DataLoader[Any], name: str, training: bool) -> DataLoader[Any]:
    """Return the loader; raise a DataError if it is used for training and `drop_last` leaves it without a batch."""
    batches = loader.batch_sampler
    if not training or not isinstance(batches, EpochBatchSampler) or batches.endless:
        return loader
    if getattr(batches.batch_sampler, "drop_last", False) and length(loader) == 0:
        per_process = "" if get_world_size() == 1 else " per process"
        raise DataError(
            f"{name} has no batches: it has {batches.samples} samples{per_process}, fewer than "
            f"batch_size={batch_size(loader)}, and drop_last=True drops the incomplete batch; lower batch_size or set "
            "drop_last=False"
        )
    return loader


def _samples_per_pass(dataset: Any, batch_sampler: Any) -> int:
    """Return the number of samples of this rank in one pass over the dataset."""
    sampler = getattr(batch_sampler, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else math.ceil(len(dataset) / get_world_size())


def _defaults(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of `DataLoader`; without workers, drop the arguments that require workers."""
    unused = () if options.get("num_workers") else ("persistent_workers", "prefetch_factor")
    return {
        "pin_memory": torch.accelerator.is_available(),
        # Without its own generator, each new iterator would draw from torch's global generator.
        "generator": torch.Generator().manual_seed(seed),
        **{key: value for key, value in options.items() if key not in unused},
    }


def _identity(batch: Any) -> Any:
    return batch


def _sharded(batches: Any, dataset: Any, seed: int, training: bool) -> Any:
    """Return a batch sampler for this rank's shard of the data; distributed samplers are returned unchanged.

    Raises:
        ConfigError: Every rank would get the same batches, because the sampler cannot be replaced.
    """
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DefaultSampler | InfiniteSampler | DistributedSampler):
        return batches
    if type(batches) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler):
        shard = DefaultSampler(dataset, type(sampler) is RandomSampler, seed, round_up=training)
        return BatchSampler(shard, batches.batch_size, batches.drop_last)
    raise ConfigError(
        f"each of the {get_world_size()} processes would get the same batches of {type(sampler or batches).__name__}; "
        "use a distributed sampler (DefaultSampler or torch's DistributedSampler)"
    )


def _wrap_loader(loader: DataLoader[Any], seed: int, training: bool, limit: int | None) -> DataLoader[Any]:
    """Return a copy of `loader` that can start at any batch and whose order depends only on seed and epoch."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or batches is None:
        return loader
    options = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
        "prefetch_factor": loader.prefetch_factor,
        "in_order": loader.in_order,
    }
    if isinstance(batches, EpochBatchSampler):  # built by `build_dataloader`
        if limit is None:
            return loader
        batches = EpochBatchSampler(
            batches.batch_sampler, batches.seed, batches.samples, batches.stamp, limit
        )
        return DataLoader(loader.dataset, batch_sampler=batches, **_defaults(options, seed))
    if get_world_size() > 1:
        batches = _sharded(batches, loader.dataset, seed, training)
    return _loader(loader.dataset, batches, seed, {**options, "num_batch_per_epoch": limit})
