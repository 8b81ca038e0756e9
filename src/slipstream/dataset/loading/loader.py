"""Data loaders whose sample order and augmentation depend only on the seed, the epoch and the indices of a batch."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
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
from slipstream.dataset.loading.stateful import LoaderBatches
from slipstream.dataset.loading.streaming import StreamingSamples, as_map_style
from slipstream.dataset.loading.workers import has_changed, prepared_workers, record_attributes
from slipstream.dist import get_local_size, get_world_size
from slipstream.errors import BuildError, ConfigError, DataError, did_you_mean
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, Registry
from slipstream.typecheck import NonNegative, NonNegativeInt, PositiveInt, Rule, check, short_repr


def build_dataloader(
    cfg: Mapping[str, Any] | DataLoader[Any] | Iterable[Any], seed: int, name: str, training: bool
) -> DataLoader[Any]:
    """Build a data loader from a configuration in MMEngine's format, or wrap an existing loader.

    Args:
        cfg: a dict with `dataset`, `sampler`, `batch_sampler`, `collate_fn` (each an object or a configuration)
            and the arguments of `torch.utils.data.DataLoader`. `num_workers="auto"` starts one worker for each core
            that this process may use. `skip_errors` is the maximum number of samples that may raise an error and be
            replaced (see `SeededDataset`). `cfg` may also be a `DataLoader`, `dict(dataloader=...,
            num_batch_per_epoch=...)` to limit the number of batches per epoch, a list of batches, which are used in
            the given order, or another library's loader, that is, an iterable of batches.
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
        if isinstance(cfg, str | bytes) or not hasattr(cfg, "__iter__"):
            raise ConfigError(
                f"must be a DataLoader, a dict or a list of batches, got {short_repr(cfg)}", name
            )
        batches: Any = cfg if isinstance(cfg, IterableDataset) else LoaderBatches(cfg)
        return RunLoader(batches, batch_size=None, collate_fn=_identity, **_defaults({}, seed))
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
    return _run_loader(dataset, batches, seed, name, training, _functions(options, name))


def _list_loader(batches: Sequence[Any], seed: int, name: str) -> RunLoader:
    """Return a loader that yields the batches of a list."""
    if not batches:
        raise DataError(f"{name} is an empty list; it must contain at least one batch")
    if get_world_size() > 1:
        raise ConfigError("a list gives the same batches to all processes; use a DataLoader or a dict", name)
    dataset: Any = list(batches)
    return RunLoader(dataset, batch_size=None, collate_fn=_identity, **_defaults({}, seed))


def set_epoch(loader: DataLoader[Any], epoch: int, start: int = 0, skip: int = 0) -> None:
    """Set the epoch of the next iteration over the loader and of its dataset, and the batch at which it starts.

    Args:
        loader: a loader.
        epoch: index of the epoch, starting at 0.
        start: index of the first batch, starting at 0.
        skip: number of samples to skip at the beginning of this batch; must be 0 unless
            `can_start_inside_batch(loader)` is True.
    """
    set_dataset_epoch(loader, epoch)
    if (order := order_of(loader)) is not None:
        order.set_epoch(epoch, start, skip)


def set_dataset_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Call the dataset's `set_epoch` method, if there is one. Hooks that run afterwards may call it again."""
    dataset: Any = loader.dataset
    if hasattr(dataset, "set_epoch"):
        # The readers of persistent workers also call this method, so these workers need not be replaced.
        order = order_of(loader)
        current = order is not None and not has_changed(loader)
        dataset.set_epoch(0 if order is not None and order.repeats else epoch)
        if current:
            record_attributes(loader)


def order_of(loader: DataLoader[Any]) -> EpochBatchSampler | None:
    """Return the sampler that determines the order of a loader, or None if the loader has its own order."""
    return getattr(loader, "order", None)


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples per batch, or None if a custom batch sampler determines it."""
    return getattr(loader.batch_sampler, "batch_size", loader.batch_size)


def can_seek(loader: DataLoader[Any]) -> bool:
    """Return whether an iteration can start at any batch without loading the batches before it."""
    return isinstance(loader, RunLoader) and loader.order is not None and not loader.iterates_itself


def can_start_inside_batch(loader: DataLoader[Any]) -> bool:
    """Return whether an iteration can start in the middle of a batch."""
    order = order_of(loader)
    return order is not None and can_seek(loader) and type(order.batch_sampler) is BatchSampler


def samples_per_epoch(loader: DataLoader[Any]) -> int | None:
    """Return the total number of samples per epoch across all ranks, or None if it is unknown or infinite."""
    batches = order_of(loader)
    if batches is None or is_infinite(loader) or not can_start_inside_batch(loader):
        return None
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


def loaders_of(loop: Any) -> list[DataLoader[Any]]:
    """Return the loaders of a loop, which has one, or several by name."""
    return list(getattr(loop, "dataloaders", {"": loop.dataloader}).values())


def is_infinite(loader: DataLoader[Any]) -> bool:
    """Return whether an iteration over the loader never ends."""
    order = order_of(loader)
    return order is not None and order.endless


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether the loader iterates over its dataset, instead of reading samples by index."""
    return isinstance(loader.dataset, IterableDataset) and order_of(loader) is None


def dataset_size(loader: DataLoader[Any]) -> int:
    """Return the number of samples in the dataset, or a very large number if it has no length."""
    dataset: Any = loader.dataset if order_of(loader) is None else as_map_style(loader.dataset)
    return len(dataset) if hasattr(dataset, "__len__") else sys.maxsize


class BatchSizes:
    """The number of this rank's samples in each batch of a pass over a loader.

    If the loader has an `EpochBatchSampler`, the sizes are those of the batches that the sampler has drawn. For
    iterable datasets and for datasets whose items are batches, the samples in each batch are counted.

    Args:
        loader: a loader returned by `build_dataloader`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def get(self, batch_index: int, batch: Any) -> int:
        """Return the number of samples in the batch with index `batch_index` (from 0) of the pass in progress.

        If this number cannot be determined, return the loader's batch size, or 1 if that is not known either.
        """
        order = order_of(self._loader)
        if order is not None and (drawn := order.recent.get((order.epoch, batch_index))) is not None:
            return len(drawn)
        count, size = count_samples(batch), batch_size(self._loader)
        return size or 1 if count is None else min(count, size or count)


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
    for field in fields:
        if isinstance(field, Tensor) and field.ndim:
            return field.shape[0]
    return next((len(field) for field in fields if isinstance(field, list | tuple)), None)


class RunLoader(DataLoader[Any]):
    """A loader of a run.

    Its `dataset`, `sampler`, `batch_sampler` and `collate_fn` are the user's objects. `order` draws from
    `batch_sampler`, and the samples are read with seeded generators. If the user passes a loader, this loader shares
    all its attributes except those in `__slots__`, and its class is a subclass of the user's class.
    """

    __slots__ = ("_failed", "_iterator", "generator", "limit", "order", "skip_errors")
    # The order of the batches; None if the dataset is iterable or has no batch sampler.
    order: EpochBatchSampler | None
    # The maximum number of batches in a pass without an `order`.
    limit: int | None
    # See `SeededDataset`.
    skip_errors: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._iterator = self.limit = self.order = None
        self.skip_errors = 0
        super().__init__(*args, **kwargs)

    @property
    def iterates_itself(self) -> bool:
        """Whether the user's class defines `__iter__`, so that batches cannot be skipped without loading them."""
        iterate: Any = super().__iter__
        return DataLoader.__iter__ is not iterate.__func__

    def __iter__(self) -> Any:
        batches: Any = super().__iter__()
        if self.order is not None and self.iterates_itself:
            batches = self._count_passes(batches, self.order)
        return batches if self.limit is None else islice(batches, self.limit)

    def _count_passes(self, batches: Iterator[Any], order: EpochBatchSampler) -> Iterator[Any]:
        """Iterate, and let each pass that the user's `__iter__` starts draw another order."""
        passes: int | None = 0
        while True:
            order.passes = passes
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                passes, order.passes = order.passes, None
            yield batch

    def __len__(self) -> int:
        count_batches: Any = super().__len__
        order: Any = self.order
        # The user's method does not know a sampler for this rank that replaces the loader's sampler.
        own = order is None or (
            self.iterates_itself and DataLoader.__len__ is not count_batches.__func__ and order.shard is None
        )
        count: int = count_batches() if own else len(order)
        return count if self.limit is None else min(count, self.limit)

    @property
    def _index_sampler(self) -> Any:
        return super()._index_sampler if self.order is None else self.order

    def _get_iterator(self) -> Any:
        if (
            type(self.dataset) in (list, LoaderBatches)
            and self.collate_fn is _identity
            and not self.pin_memory
        ):
            return iter(self.dataset)  # without the profiler records of torch's iterator
        with prepared_workers(self):
            return super()._get_iterator() if self.order is None else self._ordered_iterator(self.order)

    def _ordered_iterator(self, order: EpochBatchSampler) -> Any:
        reader, collate = self._reader(order)
        # torch's iterator reads all attributes of the loader when it is created. The dataset may be a StreamingDataset,
        # which is iterable.
        copied: Any = copied_loader(
            self,
            dataset=reader,
            collate_fn=collate,
            batch_sampler=order,
            _dataset_kind=0,
        )
        if isinstance(reader, TensorBatches) and any(t.device.type != "cpu" for t in reader.dataset.tensors):
            copied.pin_memory = False  # only CPU memory can be pinned
        return super(RunLoader, copied)._get_iterator()

    def _reader(self, order: EpochBatchSampler) -> tuple[Any, Any]:
        """Return the object from which samples are read, and the function that collates them."""
        dataset: Any = as_map_style(self.dataset)
        collate = default_collate if self.collate_fn is torch_default_collate else self.collate_fn
        indexes_tensors = type(dataset) is TensorDataset and collate is default_collate
        order.use_sample_index = not indexes_tensors
        if indexes_tensors:
            return TensorBatches(dataset), _identity
        if self.skip_errors and not hasattr(self, "_failed"):
            self._failed = torch.zeros(len(dataset), dtype=torch.bool).share_memory_()
        failed = self._failed if self.skip_errors else None
        return SeededDataset(dataset, collate, self.skip_errors, failed, order.epoch), _identity


def copied_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a shallow copy of a loader with the given attributes changed. The copy does not share persistent workers.

    A loader that is passed to a run may also be used elsewhere, for example by another run, and must not be changed.
    """
    copied = copy(loader)
    for name, value in {**attributes, "_iterator": None}.items():
        # `DataLoader` forbids setting attributes such as `batch_sampler`.
        object.__setattr__(copied, name, value)
    return copied


def _shared_loader(
    loader: DataLoader[Any], order: EpochBatchSampler | None, seed: int | None = None
) -> RunLoader:
    """Return a loader for a run that shares the attributes of `loader`, a loader of the user or of another run."""
    # SuperGradients' loaders yield other batches to scripts than to a run.
    kind: Any = getattr(loader, "run_class", type(loader))
    if kind is DataLoader:
        kind = RunLoader
    elif not issubclass(kind, RunLoader):  # the user's class may override `__iter__`
        kind = type(kind.__name__, (RunLoader, kind), {"__slots__": ()})
    shared: RunLoader = object.__new__(kind)
    object.__setattr__(shared, "__dict__", vars(loader))
    shared.generator = loader.generator if seed is None else torch.Generator().manual_seed(seed)
    shared._iterator, shared.order, shared.limit = None, order, None
    shared.skip_errors = getattr(loader, "skip_errors", 0)
    return shared


def limit_batches(
    loader: DataLoader[Any], count: int, option: str, name: str, repeat: bool = False
) -> DataLoader[Any]:
    """Return a loader with the attributes of `loader` and at most `count` batches per epoch.

    Args:
        loader: a loader returned by `build_dataloader`; it is not changed.
        count: maximum number of batches per epoch.
        option: name of the option in error messages.
        name: name of the loader in error messages.
        repeat: whether every epoch uses the batches of the first epoch, with the same augmentation.

    Raises:
        ConfigError: `repeat` is set for an iterable dataset, or the loader has no batch sampler.
    """
    dataset: Any = loader.dataset
    if (order := order_of(loader)) is not None:
        limited = copy(order)
        limited.limit = count if order.limit is None else min(count, order.limit)
        limited.repeats = repeat
        return _shared_loader(loader, limited)
    if loader.batch_sampler is None and isinstance(dataset, list):
        return build_dataloader(dataset[:count], 0, name, training=False)
    if repeat or not isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"does not support the loader in {name}, of class {type(loader).__name__}; pass a list of batches",
            option,
        )
    stream = _shared_loader(loader, None)
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
    shuffle = options.pop("shuffle", isinstance(dataset, StreamingSamples) and dataset.dataset.shuffle)
    sampler = options.pop("sampler", None) or {"type": "DefaultSampler", "shuffle": shuffle}
    if isinstance(sampler, Mapping):
        defaults = {"dataset": dataset, "data_source": dataset, "seed": seed, "round_up": training}
        sampler = DATA_SAMPLERS.build(sampler, default_args=_accepted_defaults(sampler, defaults, name))
    batch_sampler = options.pop("batch_sampler", None)
    for value, key in ((sampler, "sampler"), (batch_sampler, "batch_sampler")):
        if isinstance(value, str | bytes) or not (value is None or hasattr(value, "__iter__")):
            raise ConfigError(f"must be a sampler or its dict, not {short_repr(value)}", f"{name}.{key}")
    batch_size, drop_last = options.pop("batch_size", 1), options.pop("drop_last", False)
    if isinstance(batch_sampler, Mapping):
        return DATA_SAMPLERS.build(batch_sampler, default_args={"sampler": sampler, "batch_size": batch_size})
    return batch_sampler or BatchSampler(sampler, batch_size, drop_last)


def _accepted_defaults(sampler: Mapping[str, Any], defaults: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the defaults that the sampler's constructor accepts. torch's samplers call the dataset `data_source`."""
    kind = sampler.get("type")
    if kind is None:
        return {}  # the registry raises the error
    target = _resolve(DATA_SAMPLERS, kind, f"{name}.sampler")
    known = inspect.signature(target).parameters
    return {key: value for key, value in defaults.items() if key in known}


def _resolve(registry: Registry, kind: Any, path: str) -> Any:
    try:
        return registry.resolve(kind) if isinstance(kind, str) else kind
    except ConfigError as error:
        error.path = path
        raise


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
        function = _resolve(FUNCTIONS, kind, path)
        check(function, Callable[..., Any], f"{path}.type")
        cfg = partial(function, **rest) if rest else function
    if not callable(cfg):
        raise ConfigError(f"must be a function or the name of one in FUNCTIONS, not {short_repr(cfg)}", path)
    return cfg


def _order(
    dataset: Any,
    batch_sampler: Any,
    seed: int,
    name: str,
    training: bool,
    limit: int | None,
    shard: Any = None,
) -> EpochBatchSampler:
    sampler = getattr(batch_sampler, "sampler", None) if shard is None else shard
    # This rank's number of samples in one pass over the dataset.
    samples = len(sampler) if isinstance(sampler, Sized) else math.ceil(len(dataset) / get_world_size())
    order = EpochBatchSampler(batch_sampler, seed, samples, limit=limit, shard=shard)
    drops = training and not order.endless and getattr(batch_sampler, "drop_last", False)
    if drops and len(order) == 0:
        raise DataError(f"{name}: drop_last=True drops all {samples} samples (per process); lower batch_size")
    return order


def _run_loader(
    dataset: Any, batches: Any, seed: int, name: str, training: bool, options: dict[str, Any]
) -> RunLoader:
    limit, skip_errors = options.pop("num_batch_per_epoch", None), options.pop("skip_errors", 0)
    order = _order(dataset, batches, seed, name, training, limit)
    if type(batches) is BatchSampler:  # then torch sets the loader's `batch_size`
        options |= {
            "sampler": batches.sampler,
            "batch_size": batches.batch_size,
            "drop_last": batches.drop_last,
        }
    else:
        options["batch_sampler"] = batches
    loader = RunLoader(dataset, **_defaults(options, seed))
    if isinstance(dataset, StreamingSamples):
        object.__setattr__(loader, "dataset", dataset.dataset)
    order.batch_sampler = loader.batch_sampler
    loader.order, loader.skip_errors = order, skip_errors
    return loader


def _defaults(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments for `DataLoader`. If there are no workers, arguments that require workers are omitted."""
    unused = () if options.get("num_workers") else ("persistent_workers", "prefetch_factor", "timeout")
    return {
        "pin_memory": torch.accelerator.is_available(),
        # If the loader has no generator, each new iterator draws from torch's global generator.
        "generator": torch.Generator().manual_seed(seed),
        **{key: value for key, value in options.items() if key not in unused},
    }


def _identity(batch: Any) -> Any:
    return batch


def _shard(batches: Any, dataset: Any, seed: int, training: bool) -> Any:
    """Return a sampler for this rank's shard of the data, or None if the loader's sampler is distributed.

    Raises:
        ConfigError: the sampler is not distributed and cannot be replaced.
    """
    sampler = getattr(batches, "sampler", None)
    distributed = hasattr(sampler, "num_replicas") or hasattr(batches, "num_replicas")
    if distributed or isinstance(sampler, DefaultSampler | InfiniteSampler):
        return None
    if type(batches) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler):
        return DefaultSampler(dataset, type(sampler) is RandomSampler, seed, round_up=training)
    raise ConfigError(
        f"{type(sampler or batches).__name__} yields the same batches in all processes; use a distributed sampler "
        "(DefaultSampler or torch's DistributedSampler)"
    )


def _wrap_loader(
    loader: DataLoader[Any], seed: int, name: str, training: bool, limit: int | None
) -> DataLoader[Any]:
    """Return a loader that shares the attributes of `loader`, and whose order depends only on the seed and epoch.

    Some loaders are returned unchanged: loaders for iterable datasets (except supported MosaicML datasets), loaders
    without a batch sampler, subclasses with an endless batch sampler and, if `limit` is None, loaders that
    `build_dataloader` has already returned.
    """
    batches: Any = loader.batch_sampler
    dataset = as_map_style(loader.dataset)
    keeps_workers = type(loader).__iter__ is not DataLoader.__iter__ and not isinstance(batches, Sized)
    streams = isinstance(dataset, StreamingSamples) and loader.batch_size is not None
    if streams and order_of(loader) is None:
        sampler = DefaultSampler(dataset, dataset.dataset.shuffle, seed, round_up=training)
        batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)  # type: ignore[arg-type]  # not None
    elif order_of(loader) or isinstance(dataset, IterableDataset) or batches is None or keeps_workers:
        return loader if limit is None else limit_batches(loader, limit, f"{name}.num_batch_per_epoch", name)
    shard = _shard(batches, dataset, seed, training) if get_world_size() > 1 and not streams else None
    return _shared_loader(loader, _order(dataset, batches, seed, name, training, limit, shard), seed)
