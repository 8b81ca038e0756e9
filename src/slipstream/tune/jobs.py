"""The training runs that trials execute, with a Runner's configuration or with the user's own objects."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Sampler

from slipstream.checkpoint import set_random_state
from slipstream.config import Config
from slipstream.dataset.loading.loader import RunLoader, copied_loader, length
from slipstream.dataset.loading.samplers import EpochBatchSampler
from slipstream.errors import ConfigError, DataError
from slipstream.hooks import Hook
from slipstream.model import unwrap_model
from slipstream.speed import Capabilities, SpeedPlan
from slipstream.step import CompiledStep
from slipstream.tune.measured_config import hook_class, keep_training_only
from slipstream.tune.observer import Observer, shapes_of, total_loss

__all__ = ["ObjectsJob", "RunnerJob", "Setting", "WarningLog", "compile_problem", "merged_speed"]

_NUM_REPEATED_BATCHES = 6
"""Number of batches that a `RunnerJob` repeats, so that all trials read the same (possibly cached) samples."""

_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


@dataclass(frozen=True)
class Setting:
    """Changes that a trial makes to the baseline."""

    speed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SpeedPlan`."""
    num_workers: int | None = None
    """Number of worker processes of the training loader; None leaves it unchanged."""
    batch_size: int | None = None
    """Number of samples per batch; None leaves it unchanged."""
    split: int = 1
    """Number of smaller batches into which each baseline batch is divided; the sample order does not change."""
    processes: int = 1
    """Number of data-parallel processes; `batch_size` is the batch size of one process."""
    constant_lr: bool = False
    """Whether to remove the learning rate schedule and the check for non-finite losses, for the range test."""
    loader: Mapping[str, int] = field(default_factory=dict)
    """The values that the baseline selected for the training loader's options that are set to `auto`."""
    compile_cache: str | None = None
    """Folder for compiled code. It is initially empty, so that the compilation time can be measured."""

    @property
    def exact_size(self) -> int | None:
        """The number of samples in every batch; None if the batches are those of the baseline, possibly divided."""
        return self.batch_size if self.split == self.processes == 1 else None

    @property
    def dataloader(self) -> dict[str, Any]:
        """The changed keys of `train_dataloader` in a configuration."""
        changes: dict[str, Any] = {}
        if self.num_workers is not None:
            changes |= {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        if self.batch_size is not None:
            changes["batch_size"] = self.batch_size
        return changes

    def merge(self, other: Setting) -> Setting:
        """Return the combined changes. Changes in `other` take precedence; the options of `compile` are merged."""
        workers = self.num_workers if other.num_workers is None else other.num_workers
        processes = max(self.processes, other.processes)
        size = self.batch_size if other.batch_size is None else other.batch_size
        speed = {**self.speed, **other.speed}
        if "compile" in self.speed and "compile" in other.speed:
            speed["compile"] = {**self.speed["compile"], **other.speed["compile"]}
        return replace(
            self,
            speed=speed,
            num_workers=workers,
            batch_size=size,
            split=self.split * other.split,
            processes=processes,
        )


def merged_speed(speed: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `speed` (`'auto'`, a dict or None) as a dict, with the fields in `changes` replaced."""
    own = {"auto": True} if speed == "auto" else dict(speed or {})
    return {**own, **changes}


class WarningLog(logging.Handler):
    """Stores a run's warnings, which say why an option is not in effect."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message."""
        self.messages.append(record.getMessage())


@dataclass(frozen=True)
class RunnerJob:
    """Train with a Runner's configuration, without validation, checkpoints or trackers.

    The first batches of the first epoch are repeated in one endless pass, with the same augmentation. The learning rate
    range test, and loaders without a batch sampler, use all batches.
    """

    cfg: Mapping[str, Any]
    setting: Setting = Setting()

    def train(self, observer: Observer, folder: Path) -> None:
        """Train until the observer ends the trial; see `Job`."""
        if self.setting.processes > 1:
            from slipstream.tune.parallel import launch

            launch(self._train, observer, folder, self.setting.processes)
        else:
            self._train(observer, folder)

    def _train(self, observer: Observer, folder: Path) -> None:
        from slipstream.runner import Runner
        from slipstream.training.config_paths import at_user_paths

        if isinstance(self.cfg["train_dataloader"], DataLoader):
            _detach_workers(self.cfg["train_dataloader"])
        cfg = self.trial_config(folder)
        with at_user_paths(cfg):
            runner = Runner.from_cfg(cfg)
            warnings = WarningLog()
            runner.logger.addHandler(warnings)
            if (options := runner.speed.compile) is not None:
                options = replace(options, cache=self.setting.compile_cache or options.cache)
                runner.speed = replace(runner.speed, compile=options)
            if not self.setting.constant_lr:
                runner.train_loop.dataloader = _repeat_first_batches(runner.train_dataloader, self.setting)
            hook = _StepHook(observer)
            runner.register_hook(hook)
            observer.describe = lambda: self._describe(runner, warnings.messages, hook.shapes)
            runner.train()

    def trial_config(self, folder: Path) -> Config:
        """Return the configuration of the trial, which writes only to `folder`."""
        cfg = Config(copy.deepcopy(dict(self.cfg)))
        cfg.launcher = "none" if self.setting.processes == 1 else "pytorch"
        cfg.custom_hooks = [hook for hook in cfg.get("custom_hooks") or () if _acts_on_steps(hook)]
        keep_training_only(cfg, folder / "run")
        randomness = cfg.get("randomness") or {}
        if randomness.get("seed") is None:  # all trials must start from the same weights
            cfg.randomness = {**randomness, "seed": 0}
        cfg.speed = merged_speed(cfg.get("speed"), self.setting.speed)
        cfg.train_dataloader = self._loader(cfg.train_dataloader)
        # The run must not end before the trial.
        lengths = {"max_epochs": 10**6, "max_iters": 10**9}
        cfg.train_cfg = {**cfg.train_cfg, **{key: lengths[key] for key in lengths if key in cfg.train_cfg}}
        if self.setting.constant_lr:
            cfg.param_scheduler = None
            # The logger raises an error for a non-finite loss, but a range test may end with one.
            cfg.default_hooks["logger"] = None
        return cfg

    def _loader(self, loader: Any) -> dict[str, Any]:
        if isinstance(loader, DataLoader):
            loader = {"dataloader": loader}
        changes: dict[str, Any] = dict(self.setting.loader)
        if self.setting.exact_size is not None:
            changes["drop_last"] = False  # keeps the samples of a dataset that is smaller than one batch
        for key in ("num_workers", "batch_size"):
            if (value := getattr(self.setting, key)) is not None:
                changes[key] = value
        if "dataloader" not in loader and changes.get("num_workers", loader.get("num_workers", 0)):
            changes["persistent_workers"] = True  # timed steps must not include worker startup
        return {**loader, **changes}

    def _describe(self, runner: Any, warnings: list[str], shapes: set[Any]) -> dict[str, Any]:
        size = getattr(
            getattr(runner.train_dataloader.batch_sampler, "batch_sampler", None), "batch_size", None
        )
        loader, core = runner.train_dataloader, unwrap_model(runner.model)
        return {
            "problem": compile_problem(runner.speed, runner.step, core, warnings),
            "capabilities": Capabilities.here(runner.device.type, core),
            "sources": dict(runner.speed.sources),
            "steps_per_epoch": length(loader),
            "num_workers": loader.num_workers,
            "buffered": _buffered(loader) + (runner.speed.prefetch or 0),
            "auto": _selected_values(self.cfg["train_dataloader"], loader),
            "accumulate": runner.speed.accumulate,
            "shapes": len(shapes),
            "batch_size": None if "dataloader" in self._loader(self.cfg["train_dataloader"]) else size,
            "counts_steps": _counts_steps(self.cfg)
            or getattr(loader.batch_sampler, "limit", None) is not None,
        }


def _counts_steps(cfg: Mapping[str, Any]) -> bool:
    """Return whether the run length or the learning rate schedule is specified in steps instead of epochs."""
    schedulers = cfg.get("param_scheduler") or ()
    items = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    by_epoch = [isinstance(each, Mapping) and each.get("by_epoch", True) for each in items]
    train: Any = cfg.get("train_cfg")
    return not all(by_epoch) or not isinstance(train, Mapping) or "max_iters" in train


class _StepHook(Hook):
    """Calls the observer of a trial."""

    priority = "LOWEST"

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.shapes: set[Any] = set()
        """The distinct batch shapes."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Call the observer before the step."""
        self.shapes.add(shapes_of(data_batch))
        self._observer.before_step(runner.optim_wrapper.param_groups)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Call the observer after the step."""
        self._observer.after_step(total_loss(outputs or {}), _has_updated(runner.optim_wrapper))


def _has_updated(optim: Any) -> bool:
    """Return whether the last step ended an accumulation window. With several optimizers, every step does."""
    return optim.accumulative_counts == 1 or bool(optim.begins_window())


class _FirstBatches(EpochBatchSampler):
    """Repeats the first batches of an epoch of `batches` endlessly, with the changes in `setting`."""

    def __init__(self, batches: EpochBatchSampler, setting: Setting) -> None:
        super().__init__(
            batches.batch_sampler, batches.seed, batches.samples, batches.use_sample_index, batches.limit
        )
        self._setting = setting

    def __iter__(self) -> Iterator[list[int]]:
        split = self._setting.split
        batches = list(islice(super().__iter__(), _NUM_REPEATED_BATCHES * split))
        if self._setting.exact_size is not None:
            return cycle(_full_batches(batches, self._setting.exact_size))
        # Repeat whole batches, because the number of divided batches may not be a multiple of `split`.
        whole = [list(chain(*batches[i : i + split])) for i in range(0, len(batches), split)]
        if getattr(self.batch_sampler, "drop_last", False) and len(batches) % split:
            whole.pop()
        return chain.from_iterable(_divided(batch, split) for batch in cycle(whole))


def _full_batches(batches: list[list[int]], size: int) -> list[list[int]]:
    """Return the batches with `size` samples. If there are none, return one batch in which samples are repeated."""
    return [batch for batch in batches if len(batch) == size] or [list(islice(cycle(chain(*batches)), size))]


def _repeat_first_batches(loader: DataLoader[Any], setting: Setting) -> DataLoader[Any]:
    """Return a copy of the loader that repeats its first batches in one pass, so that workers load continuously.

    Without a batch sampler, batches are not repeated; if `setting` requires a size, incomplete batches are dropped.
    """
    batches = loader.batch_sampler
    if not isinstance(batches, EpochBatchSampler):
        return loader if setting.exact_size is None else copied_loader(loader, drop_last=True)
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    return RunLoader(loader.dataset, batch_sampler=_FirstBatches(batches, setting), **options)


@dataclass(frozen=True)
class ObjectsJob:
    """Train the user's model with `accelerate`. The loader is restarted when it is exhausted."""

    model: nn.Module
    loader: Any
    optimizer: Optimizer
    loss_fn: Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
    speed: Any
    random_state: dict[str, Any]
    setting: Setting = Setting()

    def train(self, observer: Observer, folder: Path) -> None:
        """Train until the observer ends the trial; see `Job`."""
        from slipstream.speed.accelerate import accelerate

        self._unshare()
        set_random_state(self.random_state)
        warnings = WarningLog()
        logging.getLogger("slipstream").addHandler(warnings)
        _detach_workers(self.loader)
        loader = changed_loader(self.loader, self.setting)
        speed = _with_cache(merged_speed(self.speed, self.setting.speed), self.setting.compile_cache)
        self.model.train()
        step = accelerate(self.model, self.optimizer, self.loss_fn, speed=speed)
        observer.describe = lambda: {
            "problem": compile_problem(step.plan, step._step, unwrap_model(step.model), warnings.messages),
            "capabilities": Capabilities.here(next(self.model.parameters()).device.type, self.model),
            "sources": dict(step.plan.sources),
            "steps_per_epoch": _length(loader),
            "num_workers": getattr(loader, "num_workers", 0),
            "buffered": _buffered(loader),
            "auto": {},
            "accumulate": step.plan.accumulate,
            "shapes": len(shapes),
            "batch_size": _divisible_size(self.loader),
            "counts_steps": False,
        }
        shapes: set[Any] = set()
        for batch in _endless(loader):
            shapes.add(shapes_of(batch))
            observer.before_step(step.optim.param_groups)
            observer.after_step(total_loss(step(batch)), _has_updated(step.optim))

    def _unshare(self) -> None:
        """Copy tensors out of shared memory; otherwise, a forked process would train the caller's model."""
        modules = [part for part in (self.model, self.loss_fn) if isinstance(part, nn.Module)]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        tensors += [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        values = [*self.optimizer.state.values(), *self.optimizer.param_groups]
        tensors += [leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        copies: dict[int, Any] = {}
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.is_shared():
                storage = tensor.untyped_storage()
                # Tensors that share a storage, such as views of one flat tensor, also share the copy.
                if (key := storage.data_ptr()) not in copies:
                    copies[key] = storage.clone()
                view = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(copies[key], *view)


def changed_loader(loader: Any, setting: Setting) -> Any:
    """Return a loader with the batch size and the number of workers of `setting`; the same loader if both are None.

    Raises:
        ConfigError: the loader is not a plain `DataLoader` with a map-style dataset, or the dataset is empty.
    """
    if setting.num_workers is None and setting.batch_size is None:
        return loader
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"the loader must be a torch DataLoader with a map-style dataset, not {type(loader).__name__}",
            "loader",
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise ConfigError("the dataset is empty", "loader")
    workers = loader.num_workers if setting.num_workers is None else setting.num_workers
    batches: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if setting.split > 1:
        batches = {"batch_sampler": _DividedBatchSampler(loader.batch_sampler, setting.split)}
    elif setting.batch_size is not None:
        count = max(setting.batch_size * _NUM_REPEATED_BATCHES, len(loader.dataset))  # type: ignore[arg-type]
        indices = [i % len(loader.dataset) for i in range(count)]  # type: ignore[arg-type]
        batches = {"sampler": indices, "batch_size": setting.batch_size, "drop_last": True}
    return DataLoader(
        loader.dataset,
        **batches,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        persistent_workers=workers > 0,
    )


class _DividedBatchSampler(Sampler[list[int]]):
    """Divides each batch of a batch sampler into smaller batches, without changing the order of the samples."""

    def __init__(self, batches: Any, parts: int) -> None:
        self._batches, self._parts = batches, parts

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield from _divided(batch, self._parts)

    def __len__(self) -> int:
        return len(self._batches) * self._parts


def _divided(batch: list[int], parts: int) -> list[list[int]]:
    """Divide a batch into `parts` smaller batches. A part that would be empty contains the whole batch instead."""
    size = math.ceil(len(batch) / parts)
    return [batch[i * size : (i + 1) * size] or batch for i in range(parts)]


def _divisible_size(loader: Any) -> int | None:
    """Return the batch size of a loader whose batches `changed_loader` can divide; None for other loaders."""
    plain = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    return loader.batch_size if plain else None


def _detach_workers(loader: Any) -> None:
    """Make a loader with persistent workers start new workers instead of using the parent process's workers."""
    if isinstance(loader, DataLoader) and loader._iterator is not None:
        # Deleting the iterator would terminate the parent process's workers.
        loader._iterator_of_parent = loader._iterator
        loader._iterator = None


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise DataError(
                "the loader yields no batches, or can be iterated only once; pass a DataLoader or a list of batches"
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _buffered(loader: Any) -> int:
    """Return the number of batches that a loader's workers can prefetch while the trial is paused."""
    return getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0)


def _selected_values(cfg: Any, loader: DataLoader[Any]) -> dict[str, int]:
    """Return the options that are set to `auto` in the loader's configuration, with the selected values."""
    own = cfg if isinstance(cfg, Mapping) else {}
    values = {
        key: getattr(loader, key) for key in ("num_workers", "prefetch_factor") if own.get(key) == "auto"
    }
    return {key: value for key, value in values.items() if value is not None}


def _acts_on_steps(hook: Any) -> bool:
    """Return whether a hook affects training steps; other hooks write files or validate."""
    kind = hook_class(hook)
    if not isinstance(kind, type):
        return True  # the Runner raises an error for this type
    stages = ("before_train_iter", "after_train_iter", "_before_iter", "_after_iter")
    return any(getattr(kind, stage, None) is not getattr(Hook, stage, None) for stage in stages)


def _with_cache(speed: dict[str, Any], cache: str | None) -> dict[str, Any]:
    """Return `speed` with a cache for compiled code, if it compiles."""
    value = speed.get("compile")
    if not value:
        return speed
    options = (
        {"scope": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    )
    return {**speed, "compile": {"cache": cache or True, **options}}


def compile_problem(plan: SpeedPlan, step: Any, core: nn.Module, warnings: list[str]) -> str | None:
    """Return why the plan's compiled code is not in use, or None if it is in use."""
    if plan.compile is None:
        return None
    if isinstance(step, CompiledStep) and step.uses_graph:
        return None
    compiled = any(module._compiled_call_impl is not None for module in core.modules())
    if compiled and plan.compile.scope not in (None, "step"):
        return None
    return next((text for text in warnings if "compil" in text), "the step is not compiled") + (
        "; only the model is compiled" if compiled and not warnings else ""
    )
