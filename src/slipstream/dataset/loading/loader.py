"""Data loaders whose order and augmentation depend on (seed, epoch, index) alone."""

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
from slipstream.dataset.loading.generators import OwnGenerators, seed_generators
from slipstream.dataset.loading.samplers import (
    DefaultSampler,
    EpochBatchSampler,
    InfiniteSampler,
    check_not_empty,
)
from slipstream.dataset.loading.workers import check_workers, with_workers
from slipstream.dataset.transforms.device_transforms import check_alike
from slipstream.dist import get_world_size
from slipstream.errors import BuildError, ConfigError, DataError, did_you_mean
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS

__all__ = ["SeededDataset", "batch_size", "build_dataloader", "is_infinite", "length", "set_epoch"]


def build_dataloader(
    cfg: Mapping[str, Any] | DataLoader[Any], seed: int, name: str, training: bool
) -> DataLoader[Any]:
    """Build a data loader from MMEngine's configuration, or take over a ready one.

    Args:
        cfg: `dataset`, `sampler`, `batch_sampler`, `collate_fn` (each an object or a configuration) and
            the arguments of `torch.utils.data.DataLoader`, of which `num_workers` and `prefetch_factor` may be
            `auto` (see `with_workers`); or a `DataLoader`, as it is or, to take no more than
            some of its batches, as `dict(dataloader=..., num_batch_per_epoch=...)`.
        seed: the run's seed; it fixes order and augmentation whatever the number of workers.
        name: what errors call it (`train_dataloader`).
        training: whether ranks must get equally many samples (they are then padded).

    Raises:
        ConfigError: an unknown or missing key.
        DataError: the data set is empty, or smaller than a batch where `drop_last` leaves that out.
    """
    limit = None
    if isinstance(cfg, Mapping) and isinstance(ready := cfg.get("dataloader"), DataLoader):
        limit, cfg = _limit(cfg, name), ready
    if isinstance(cfg, DataLoader):
        check_not_empty(cfg.dataset, name)
        return _with_batches(_take_over(cfg, seed, training, limit), name, training)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"must be a DataLoader or a dict, not {type(cfg).__name__}", name)
    options = dict(cfg)
    _check_keys(options, name)
    dataset = _dataset(options.pop("dataset"), name)
    check_workers(options, name, streamed=isinstance(dataset, IterableDataset))
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, **_defaults(_collate(options, name), seed))
    batches = _batch_sampler(options, dataset, seed, training)
    return _with_batches(_loader(dataset, batches, seed, _collate(options, name), name), name, training)


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


def length(loader: DataLoader[Any]) -> int | None:
    """Return how many batches an epoch has, None for an iterable data set that does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def is_infinite(loader: DataLoader[Any]) -> bool:
    """Say whether the loader's stream never ends."""
    return isinstance(loader.batch_sampler, EpochBatchSampler) and loader.batch_sampler.endless


class SeededDataset(Dataset[Any]):
    """A data set whose use of Python's, NumPy's and torch's global generators depends on the sample alone.

    Before each sample the three generators are seeded from (seed, epoch, index), and a batch is collated
    before they are put back, so that a `collate_fn` may draw too. Attributes are those of the data set.

    Args:
        dataset: any data set that is indexed.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self._generators = OwnGenerators()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # asked while unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: Any) -> Any:
        with self._generators:
            return self._get(index)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._generators:
            samples = [self._get(index) for index in indices]
            check_alike(samples)
            return self.collate(samples)

    def _get(self, index: Any) -> Any:
        if hasattr(index, "__index__"):  # a key of another kind has no number to seed from
            seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
            seed_generators((seed, epoch, int(index) % 2**64))
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
        device = self.dataset.tensors[0].device
        positions = torch.tensor(indices, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        return [tensor[positions] for tensor in self.dataset.tensors]


def _limit(cfg: Mapping[str, Any], name: str) -> int | None:
    """Return how many batches of a ready loader shall be taken."""
    if other := sorted(set(cfg) - {"dataloader", "num_batch_per_epoch"}):
        raise ConfigError(f"a ready loader keeps its own '{other[0]}': leave it out", name)
    limit: int | None = cfg.get("num_batch_per_epoch")
    _check_limit(limit, name)
    ready = cfg["dataloader"]
    if limit is not None and (isinstance(ready.dataset, IterableDataset) or ready.batch_sampler is None):
        raise ConfigError(
            "only batches that a batch sampler draws are counted", f"{name}.num_batch_per_epoch"
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
        raise ConfigError("needs a 'dataset'", name)
    if not isinstance(options.get("batch_size", 1), int) or options.get("batch_size", 1) < 1:
        raise ConfigError(
            f"must be a whole number of at least 1, not {options['batch_size']!r}", f"{name}.batch_size"
        )
    _check_limit(options.get("num_batch_per_epoch"), name)


def _dataset(cfg: Any, name: str) -> Any:
    dataset = DATASETS.build(cfg) if isinstance(cfg, Mapping) else cfg
    if hasattr(dataset, "full_init"):  # OpenMMLab's data sets may be built lazily
        dataset.full_init()
    check_not_empty(dataset, name)
    return dataset


def _batch_sampler(options: dict[str, Any], dataset: Any, seed: int, training: bool) -> Any:
    shuffle = options.pop("shuffle", False)
    sampler = options.pop("sampler", None) or {"type": "DefaultSampler", "shuffle": shuffle}
    if isinstance(sampler, Mapping):
        defaults = {"dataset": dataset, "data_source": dataset, "seed": seed, "round_up": training}
        sampler = DATA_SAMPLERS.build(sampler, default_args=_accepted(sampler, defaults))
    batch_sampler = options.pop("batch_sampler", None)
    batch_size, drop_last = options.pop("batch_size", 1), options.pop("drop_last", False)
    if isinstance(batch_sampler, Mapping):
        return DATA_SAMPLERS.build(batch_sampler, default_args={"sampler": sampler, "batch_size": batch_size})
    return batch_sampler or BatchSampler(sampler, batch_size, drop_last)


def _accepted(sampler: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return those defaults that the sampler's constructor takes; torch's name the data set otherwise."""
    kind = sampler.get("type")
    if kind is None:
        return {}  # the registry says what is missing
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
            raise BuildError("needs a 'type'", f"{name}.collate_fn")
        function = FUNCTIONS.resolve(kind) if isinstance(kind, str) else kind
        collate = partial(function, **rest) if rest else function
    return {**options, "collate_fn": collate}


def _loader(
    dataset: Any, batch_sampler: Any, seed: int, options: dict[str, Any], name: str = ""
) -> DataLoader[Any]:
    collate, limit = options["collate_fn"], options.pop("num_batch_per_epoch", None)
    tensors = type(dataset) is TensorDataset and collate is default_collate
    samples = _pass_length(dataset, batch_sampler)
    batches = EpochBatchSampler(batch_sampler, seed, samples, stamp=not tensors, limit=limit)
    if tensors:
        if any(tensor.device.type != "cpu" for tensor in dataset.tensors):
            options["pin_memory"] = False  # only the CPU's memory can be pinned
        dataset, options["collate_fn"] = TensorBatches(dataset), _as_it_is
    elif collate is not default_collate or not getattr(dataset, "draws_nothing_global", False):
        dataset, options["collate_fn"] = SeededDataset(dataset, collate), _as_it_is
    options = with_workers(options, dataset, batches, name)
    return DataLoader(dataset, batch_sampler=batches, **_defaults(options, seed))


def _with_batches(loader: DataLoader[Any], name: str, training: bool) -> DataLoader[Any]:
    """Return the loader; raise DataError if it is for training and drops its only batch."""
    batches = loader.batch_sampler
    if not training or not isinstance(batches, EpochBatchSampler) or batches.endless:
        return loader
    if getattr(batches.batch_sampler, "drop_last", False) and length(loader) == 0:
        whose = "its samples" if get_world_size() == 1 else "the samples of each process"
        raise DataError(
            f"{name} gives no batch: {whose}, {batches.samples}, are fewer than batch_size={batch_size(loader)}, and "
            f"drop_last=True leaves the smaller batch out; lower its batch_size, or set its drop_last=False"
        )
    return loader


def _pass_length(dataset: Any, batch_sampler: Any) -> int:
    """Return this rank's samples in one pass over the data set."""
    sampler = getattr(batch_sampler, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else math.ceil(len(dataset) / get_world_size())


def _defaults(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return a `DataLoader`'s arguments without those that only make sense for workers, if there are none."""
    idle = () if options.get("num_workers") else ("persistent_workers", "prefetch_factor")
    return {
        "pin_memory": torch.accelerator.is_available(),
        # Without a generator of its own, each new iterator would draw from the model's random stream.
        "generator": torch.Generator().manual_seed(seed),
        **{key: value for key, value in options.items() if key not in idle},
    }


def _as_it_is(batch: Any) -> Any:
    return batch


def _shared_out(batches: Any, dataset: Any, seed: int, training: bool) -> Any:
    """Return batches of this rank's part of the data; a sampler that knows its rank stays.

    Raises:
        ConfigError: every rank would get the same batches, and how to part them is not known.
    """
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DefaultSampler | InfiniteSampler | DistributedSampler):
        return batches
    if type(batches) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler):
        part = DefaultSampler(dataset, type(sampler) is RandomSampler, seed, round_up=training)
        return BatchSampler(part, batches.batch_size, batches.drop_last)
    raise ConfigError(
        f"with {get_world_size()} processes each would get the same batches of {type(sampler or batches).__name__}: "
        "take a sampler that knows its rank (DefaultSampler, torch's DistributedSampler)"
    )


def _take_over(loader: DataLoader[Any], seed: int, training: bool, limit: int | None) -> DataLoader[Any]:
    """Return a loader like `loader` whose order depends on the seed and that can start anywhere."""
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
    if isinstance(batches, EpochBatchSampler):  # one of ours
        if limit is None:
            return loader
        batches = EpochBatchSampler(
            batches.batch_sampler, batches.seed, batches.samples, batches.stamp, limit
        )
        return DataLoader(loader.dataset, batch_sampler=batches, **_defaults(options, seed))
    if get_world_size() > 1:
        batches = _shared_out(batches, loader.dataset, seed, training)
    return _loader(loader.dataset, batches, seed, {**options, "num_batch_per_epoch": limit})
