"""Data loaders whose sample order and augmentation depend only on (seed, epoch, index)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from copy import copy
from functools import partial
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
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

from slipstream.cores import cores
from slipstream.dataset.loading.collate import default_collate, torch_default_collate
from slipstream.dataset.loading.samplers import (
    DefaultSampler,
    EpochBatchSampler,
    InfiniteSampler,
    check_not_empty,
)
from slipstream.dataset.loading.samples import SeededDataset, TensorBatches
from slipstream.dataset.loading.streaming import StreamingSamples, as_map_style
from slipstream.dataset.loading.workers import worker_init
from slipstream.dist import get_local_size, get_world_size
from slipstream.errors import BuildError, ConfigError, DataError, did_you_mean
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS
from slipstream.typecheck import NonNegative, NonNegativeInt, PositiveInt, Rule, check, short_repr

__all__ = [
    "BatchSizes", "RunLoader", "batch_size", "build_dataloader", "can_start_inside_batch", "copied_loader",
    "count_samples", "is_infinite", "length", "limit_batches", "samples_per_epoch", "set_epoch",
]  # fmt: skip


def build_dataloader(
    cfg: Mapping[str, Any] | DataLoader[Any] | Sequence[Any], seed: int, name: str, training: bool
) -> DataLoader[Any]:
    """Build a data loader from a configuration in MMEngine's format, or wrap an existing `DataLoader`.

    Args:
        cfg: a dict with `dataset`, `sampler`, `batch_sampler`, `collate_fn` (each an object or a configuration)
            and the arguments of `torch.utils.data.DataLoader`. `num_workers="auto"` starts one worker for each core
            that this process may use. `skip_errors` is the maximum number of samples that may raise an error and be
            replaced (see `SeededDataset`). `cfg` may also be a `DataLoader`, `dict(dataloader=...,
            num_batch_per_epoch=...)` to limit the number of batches per epoch, or a list of batches, which are used in
            the given order.
        seed: seed of the run. The order and the augmentation depend on it, but not on the number of workers.
        name: name of the loader in error messages (such as `train_dataloader`).
        training: whether all ranks must get the same number of samples; if so, some samples may be repeated.

    Raises:
        ConfigError: a key is unknown or missing, or its value is not supported.
        DataError: the dataset is empty, or `drop_last` is set and the dataset is smaller than one batch.
    """
    limit = None
    if isinstance(cfg, Mapping) and isinstance(existing := cfg.get("dataloader"), DataLoader):
        limit, cfg = _limit(cfg, name), existing
    if isinstance(cfg, DataLoader):
        check_not_empty(cfg.dataset, name)
        return _wrap_loader(cfg, seed, name, training, limit)
    if isinstance(cfg, list | tuple):
        return _list_loader(cfg, seed, name)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"must be a DataLoader, a dict or a list of batches, got {short_repr(cfg)}", name)
    options = dict(cfg)
    _check_options(options, name, training)
    dataset = _dataset(options.pop("dataset"), name)
    if options.get("num_workers") == "auto":
        options["num_workers"] = max(cores() // get_local_size(), 1)
    if isinstance(dataset, IterableDataset):
        if options.pop("skip_errors", 0):
            raise ConfigError("does not support iterable datasets; remove this option", f"{name}.skip_errors")
        return RunLoader(dataset, **_defaults(_functions(options, name), seed))
    batches = _batch_sampler(options, dataset, seed, training, name)
    return _loader(dataset, batches, seed, name, training, _functions(options, name))


def _list_loader(batches: Sequence[Any], seed: int, name: str) -> RunLoader:
    """Return a loader that yields the batches of a list."""
    if not batches:
        raise DataError(f"{name} is an empty list; it must contain at least one batch")
    if get_world_size() > 1:
        raise ConfigError("a list gives the same batches to all processes; use a DataLoader or a dict", name)
    dataset: Any = list(batches)
    return RunLoader(dataset, batch_size=None, collate_fn=_identity, **_defaults({}, seed))


def set_epoch(loader: DataLoader[Any], epoch: int, start: int = 0, skip: int = 0) -> None:
    """Set the epoch of the next iteration over the loader, and the batch at which it starts.

    Args:
        loader: a loader.
        epoch: index of the epoch, starting at 0.
        start: index of the first batch, starting at 0.
        skip: number of samples to skip at the beginning of this batch; must be 0 unless
            `can_start_inside_batch(loader)` is True.
    """
    if isinstance(loader.batch_sampler, EpochBatchSampler):
        loader.batch_sampler.set_epoch(epoch, start, skip)
    elif hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples per batch, or None if a custom batch sampler determines it."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    size: int | None = getattr(batches, "batch_size", loader.batch_size)
    return size


def can_start_inside_batch(loader: DataLoader[Any]) -> bool:
    """Return whether an iteration can start in the middle of a batch."""
    batches = loader.batch_sampler
    return isinstance(batches, EpochBatchSampler) and type(batches.batch_sampler) is BatchSampler


def samples_per_epoch(loader: DataLoader[Any]) -> int | None:
    """Return the total number of samples per epoch across all ranks, or None if it is unknown or infinite."""
    batches = loader.batch_sampler
    if is_infinite(loader) or not can_start_inside_batch(loader):
        return None
    assert isinstance(batches, EpochBatchSampler)
    size: int = batches.batch_sampler.batch_size
    full = batches.samples
    if batches.limit is not None and isinstance(batches.sampler, InfiniteSampler):
        return batches.limit * size * get_world_size()  # more than one pass, if the limit is large
    if batches.batch_sampler.drop_last:
        full -= full % size
    return (full if batches.limit is None else min(full, batches.limit * size)) * get_world_size()


def length(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches per epoch, or None for an iterable dataset without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def is_infinite(loader: DataLoader[Any]) -> bool:
    """Return whether an iteration over the loader never ends."""
    return isinstance(loader.batch_sampler, EpochBatchSampler) and loader.batch_sampler.endless


class BatchSizes:
    """The number of this rank's samples in each batch of a pass over a loader.

    If the loader has an `EpochBatchSampler`, the sizes are those of the batches that the sampler has drawn. For
    iterable datasets and for datasets whose items are batches, the samples in each batch are counted.

    Args:
        loader: a loader returned by `build_dataloader`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._size = batch_size(loader)
        self._batches = loader.batch_sampler if isinstance(loader.batch_sampler, EpochBatchSampler) else None

    def get(self, batch_index: int, batch: Any) -> int:
        """Return the number of samples in the batch with index `batch_index` (from 0) of the pass in progress.

        If this number cannot be determined, return the loader's batch size, or 1 if that is not known either.
        """
        if self._batches is not None:
            drawn = self._batches.recent.get((self._batches.epoch, batch_index))
            if drawn is not None:
                return len(drawn)
        count = count_samples(batch)
        return self._size or 1 if count is None else min(count, self._size or count)


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a collated batch, or None if it cannot be determined from the batch structure.

    If the batch or one of its fields is a tensor, the number of samples is the size of the tensor's first dimension.
    Otherwise, it is the length of the first field that is a list or a tuple. In a dict, the `inputs` field takes
    precedence.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    fields = batch
    if isinstance(batch, Mapping):
        inputs = batch.get("inputs")
        fields = [inputs] if isinstance(inputs, Tensor | list | tuple) else list(batch.values())
    if not isinstance(fields, list | tuple):
        return None
    tensors = (len(field) for field in fields if isinstance(field, Tensor) and field.ndim)
    lists = (len(field) for field in fields if isinstance(field, list | tuple))
    return next(tensors, next(lists, None))


class RunLoader(DataLoader[Any]):
    """A `DataLoader` with an optional `limit` on the number of batches per pass over an iterable dataset."""

    limit: int | None = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self.limit is None else islice(batches, self.limit)

    def __len__(self) -> int:
        count = super().__len__()
        return count if self.limit is None else min(count, self.limit)


def copied_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a shallow copy of a loader with the given attributes changed. The copy does not share persistent workers.

    A loader that is passed to a run may also be used elsewhere, for example by another run, and must not be changed.
    """
    copied = copy(loader)
    # `DataLoader` forbids setting attributes such as `batch_sampler`.
    vars(copied).update(attributes, _iterator=None)
    return copied


def limit_batches(
    loader: DataLoader[Any], count: int, option: str, name: str, repeat: bool = False
) -> DataLoader[Any]:
    """Return a copy of `loader` with at most `count` batches per epoch.

    Args:
        loader: a loader returned by `build_dataloader`; it is not changed.
        count: maximum number of batches per epoch.
        option: name of the option in error messages.
        name: name of the loader in error messages.
        repeat: whether every epoch uses the batches of the first epoch, with the same augmentation.

    Raises:
        ConfigError: `repeat` is set for an iterable dataset, or the loader is a subclass of `DataLoader`.
    """
    batches: Any = loader.batch_sampler
    dataset: Any = loader.dataset
    if isinstance(batches, EpochBatchSampler):
        limited = copy(batches)
        limited.limit = count if batches.limit is None else min(count, batches.limit)
        limited.repeats = repeat
        return copied_loader(loader, batch_sampler=limited)
    if batches is None and isinstance(dataset, list):
        return build_dataloader(dataset[:count], 0, name, training=False)
    if repeat or not isinstance(dataset, IterableDataset) or type(loader) not in (DataLoader, RunLoader):
        raise ConfigError(
            f"does not support the loader in {name}, of class {type(loader).__name__}; pass a list of batches",
            option,
        )
    options = {**_copied_options(loader), "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    stream = RunLoader(dataset, generator=loader.generator, **options)
    stream.limit = min(count, getattr(loader, "limit", None) or count)
    return stream


def _limit(cfg: Mapping[str, Any], name: str) -> int | None:
    """Return the maximum number of batches per epoch for a dict that contains a `DataLoader`."""
    if other := sorted(set(cfg) - {"dataloader", "num_batch_per_epoch"}):
        raise ConfigError(f"'{other[0]}' cannot be changed for an existing DataLoader; remove this key", name)
    limit: int | None = cfg.get("num_batch_per_epoch")
    check(limit, PositiveInt | None, f"{name}.num_batch_per_epoch")
    return limit


_Count = Annotated[int, Rule(lambda value: 0 <= value <= 1024, "from 0 to 1024")]
# The types of the options that `torch.utils.data.DataLoader` does not check.
_TYPES: Mapping[str, Any] = {
    "batch_size": Annotated[int, Rule(lambda size: 1 <= size <= 10**8, "from 1 to 10**8")],
    "num_workers": _Count | Literal["auto"],
    "prefetch_factor": _Count | None,
    "num_batch_per_epoch": PositiveInt | None,
    "skip_errors": NonNegativeInt,
    "shuffle": bool | None,
    "drop_last": bool,
    "pin_memory": bool,
    "persistent_workers": bool,
    "in_order": bool,
    "timeout": NonNegative,
    "multiprocessing_context": Literal["fork", "spawn", "forkserver"] | BaseContext | None,
    "pin_memory_device": str,
    "generator": torch.Generator | None,
}


def _check_options(options: Mapping[str, Any], name: str, training: bool) -> None:
    known = [*inspect.signature(DataLoader).parameters, "num_batch_per_epoch", "skip_errors"]
    for key in options:
        if key not in known:
            hint = did_you_mean(key, known, f"dataloader.{key}")
            raise ConfigError(f"there is no option '{key}'{hint}", name)
    if "dataset" not in options:
        raise ConfigError("the key 'dataset' is missing; set it to a dataset or its configuration", name)
    for key, annotation in _TYPES.items():
        if key in options:
            check(options[key], annotation, f"{name}.{key}")
    if options.get("timeout") and not options.get("num_workers"):
        raise ConfigError("requires worker processes; set num_workers to at least 1", f"{name}.timeout")
    if options.get("skip_errors") and not training:
        raise ConfigError("would count replacements twice in metrics; remove it", f"{name}.skip_errors")


def _dataset(cfg: Any, name: str) -> Any:
    dataset = as_map_style(DATASETS.build(cfg) if isinstance(cfg, Mapping) else cfg)
    readable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if not readable or isinstance(dataset, str | bytes | Mapping):
        raise ConfigError(f"must be a dataset or its dict, not {short_repr(dataset)}", f"{name}.dataset")
    if hasattr(dataset, "full_init"):  # OpenMMLab datasets may be initialized lazily
        dataset.full_init()
    if isinstance(dataset, list | tuple) and any(isinstance(item, Dataset) for item in dataset):
        raise ConfigError("must be one dataset; combine datasets with ConcatDataset", f"{name}.dataset")
    check_not_empty(dataset, name)
    return dataset


def _batch_sampler(options: dict[str, Any], dataset: Any, seed: int, training: bool, name: str) -> Any:
    shuffle = options.pop("shuffle", isinstance(dataset, StreamingSamples) and dataset.stream.shuffle)
    sampler = options.pop("sampler", None) or {"type": "DefaultSampler", "shuffle": shuffle}
    if isinstance(sampler, Mapping):
        defaults = {"dataset": dataset, "data_source": dataset, "seed": seed, "round_up": training}
        sampler = DATA_SAMPLERS.build(sampler, default_args=_accepted_defaults(sampler, defaults))
    batch_sampler = options.pop("batch_sampler", None)
    for value, key in ((sampler, "sampler"), (batch_sampler, "batch_sampler")):
        if isinstance(value, str | bytes) or not (value is None or hasattr(value, "__iter__")):
            raise ConfigError(f"must be a sampler or its dict, not {short_repr(value)}", f"{name}.{key}")
    batch_size, drop_last = options.pop("batch_size", 1), options.pop("drop_last", False)
    if isinstance(batch_sampler, Mapping):
        return DATA_SAMPLERS.build(batch_sampler, default_args={"sampler": sampler, "batch_size": batch_size})
    return batch_sampler or BatchSampler(sampler, batch_size, drop_last)


def _accepted_defaults(sampler: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that the sampler's constructor accepts. torch's samplers call the dataset `data_source`."""
    kind = sampler.get("type")
    if kind is None:
        return {}  # the registry raises the error
    target = DATA_SAMPLERS.resolve(kind) if isinstance(kind, str) else kind
    known = inspect.signature(target).parameters
    return {key: value for key, value in defaults.items() if key in known}


def _functions(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options with `collate_fn` and `worker_init_fn` as functions."""
    collate = _function(options.get("collate_fn") or "default_collate", f"{name}.collate_fn")
    options = {**options, "collate_fn": default_collate if collate is torch_default_collate else collate}
    if options.get("worker_init_fn") is not None:
        options["worker_init_fn"] = _function(options["worker_init_fn"], f"{name}.worker_init_fn")
    return options


def _function(cfg: Any, path: str) -> Any:
    """Return `cfg` if it is a function, or the registered function specified by a name or a dict with a `type`.

    Names are looked up only in the registry, so a YAML or JSON configuration file cannot import a function.
    """
    if isinstance(cfg, str):
        cfg = {"type": cfg}
    if isinstance(cfg, Mapping):
        rest = dict(cfg)
        kind = rest.pop("type", None)
        if kind is None:
            raise BuildError("the key 'type' is missing; set it to the name of a function in FUNCTIONS", path)
        function = FUNCTIONS.resolve(kind) if isinstance(kind, str) else kind
        check(function, Callable[..., Any], f"{path}.type")
        cfg = partial(function, **rest) if rest else function
    if not callable(cfg):
        raise ConfigError(f"must be a function or the name of one in FUNCTIONS, not {short_repr(cfg)}", path)
    return cfg


def _loader(
    dataset: Any, batch_sampler: Any, seed: int, name: str, training: bool, options: dict[str, Any]
) -> RunLoader:
    collate, limit = options["collate_fn"], options.pop("num_batch_per_epoch", None)
    skip_errors = options.pop("skip_errors", 0)
    indexes_tensors = type(dataset) is TensorDataset and collate is default_collate
    sampler = getattr(batch_sampler, "sampler", None)
    # This rank's number of samples in one pass over the dataset.
    samples = len(sampler) if isinstance(sampler, Sized) else math.ceil(len(dataset) / get_world_size())
    batches = EpochBatchSampler(
        batch_sampler, seed, samples, use_sample_index=not indexes_tensors, limit=limit
    )
    drops = training and not batches.endless and getattr(batch_sampler, "drop_last", False)
    if drops and len(batch_sampler) == 0:
        raise DataError(f"{name}: drop_last=True drops all {samples} samples (per process); lower batch_size")
    needs_seeds = not getattr(dataset, "independent_of_global_rng", False)
    if indexes_tensors:
        if any(tensor.device.type != "cpu" for tensor in dataset.tensors):
            options["pin_memory"] = False  # only CPU memory can be pinned
        dataset, options["collate_fn"] = TensorBatches(dataset), _identity
    elif skip_errors or collate is not default_collate or needs_seeds:
        dataset, options["collate_fn"] = SeededDataset(dataset, collate, skip_errors), _identity
    return RunLoader(dataset, batch_sampler=batches, **_defaults(options, seed))


def _defaults(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments for `DataLoader`. If there are no workers, arguments that require workers are omitted."""
    unused = () if options.get("num_workers") else ("persistent_workers", "prefetch_factor", "timeout")
    return {
        "pin_memory": torch.accelerator.is_available(),
        # If the loader has no generator, each new iterator draws from torch's global generator.
        "generator": torch.Generator().manual_seed(seed),
        **{key: value for key, value in options.items() if key not in unused},
        "worker_init_fn": worker_init(options.get("worker_init_fn")),
    }


def _identity(batch: Any) -> Any:
    return batch


def _shard(batches: Any, dataset: Any, seed: int, training: bool) -> Any:
    """Return a batch sampler for this rank's shard of the data; distributed samplers are returned unchanged.

    Raises:
        ConfigError: the sampler is not distributed and cannot be replaced.
    """
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DefaultSampler | InfiniteSampler | DistributedSampler):
        return batches
    if type(batches) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler):
        shard = DefaultSampler(dataset, type(sampler) is RandomSampler, seed, round_up=training)
        return BatchSampler(shard, batches.batch_size, batches.drop_last)
    raise ConfigError(
        f"{type(sampler or batches).__name__} yields the same batches in all processes; use a distributed sampler "
        "(DefaultSampler or torch's DistributedSampler)"
    )


def _wrap_loader(
    loader: DataLoader[Any], seed: int, name: str, training: bool, limit: int | None
) -> DataLoader[Any]:
    """Return a copy of `loader` that can start at any batch and whose order depends only on the seed and epoch.

    Some loaders are returned unchanged: loaders for iterable datasets (except supported MosaicML datasets), loaders
    without a batch sampler and, if `limit` is None, loaders that `build_dataloader` has already wrapped.
    """
    batches: Any = loader.batch_sampler
    dataset = as_map_style(loader.dataset)
    if isinstance(batches, EpochBatchSampler):  # built by `build_dataloader`
        return loader if limit is None else limit_batches(loader, limit, f"{name}.num_batch_per_epoch", name)
    if isinstance(dataset, StreamingSamples) and loader.batch_size is not None:
        sampler = DefaultSampler(dataset, dataset.stream.shuffle, seed, round_up=training)
        batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    elif isinstance(dataset, IterableDataset) or batches is None:
        return loader if limit is None else limit_batches(loader, limit, f"{name}.num_batch_per_epoch", name)
    elif get_world_size() > 1:
        batches = _shard(batches, dataset, seed, training)
    options = {**_copied_options(loader), "num_batch_per_epoch": limit}
    return _loader(dataset, batches, seed, name, training, options)


def _copied_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's arguments for `DataLoader`, except the dataset, the generator and those that select samples."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "persistent_workers", "prefetch_factor", "in_order",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}
