"""The training runs that trials execute, with a Runner's configuration or with the user's own objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.checkpoint import set_random_state
from slipstream.config import Config
from slipstream.dataset.loading.loader import copied_loader, length, order_of
from slipstream.dataset.loading.samplers import EpochBatchSampler
from slipstream.errors import ConfigError, DataError
from slipstream.hooks import CheckpointHook, Hook, PreemptionHook, ProfilerHook, ReportHook
from slipstream.model import unwrap_model
from slipstream.registry import HOOKS
from slipstream.speed import Capabilities, SpeedPlan
from slipstream.step import CompiledStep
from slipstream.tune.observer import Observer, shapes_of, total_loss

# Number of batches that a `RunnerJob` repeats, so that all trials read the same (possibly cached) samples.
_NUM_REPEATED_BATCHES = 6

_WRITING_HOOKS = (CheckpointHook, PreemptionHook, ProfilerHook, ReportHook)


@dataclass(frozen=True)
class Setting:
    """Changes that a trial makes to the baseline."""

    # Fields of `SpeedPlan`.
    speed: Mapping[str, Any] = field(default_factory=dict)
    # Number of worker processes of the training loader; None leaves it unchanged.
    num_workers: int | None = None
    # Number of samples in every batch; None leaves it unchanged.
    batch_size: int | None = None
    # Whether to remove the learning rate schedule and the check for non-finite losses, for the range test.
    constant_lr: bool = False
    # Whether to train on the first batch only, without loading data.
    single_batch: bool = False
    # Folder for compiled code. It is initially empty, so that the compilation time can be measured.
    compile_cache: str | None = None

    @property
    def dataloader(self) -> dict[str, Any]:
        """The changed keys of `train_dataloader` in a configuration."""
        workers, size = self.num_workers, self.batch_size
        changes = {} if workers is None else {"num_workers": workers, "persistent_workers": workers > 0}
        return changes if size is None else {**changes, "batch_size": size}

    def merge(self, other: Setting) -> Setting:
        """Return the combined changes. Changes in `other` take precedence; the options of `compile` are merged."""
        speed = {**self.speed, **other.speed}
        if "compile" in self.speed and "compile" in other.speed:
            speed["compile"] = {**self.speed["compile"], **other.speed["compile"]}
        workers = self.num_workers if other.num_workers is None else other.num_workers
        return replace(self, speed=speed, num_workers=workers)


def merged_speed(speed: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `speed` (`'auto'`, a dict or None) as a dict, with the fields in `changes` replaced."""
    own = {"auto": True} if speed == "auto" else dict(speed or {})
    return {**own, **changes}


def keep_training_only(cfg: Config, work_dir: str | Path) -> None:
    """Remove validation, tests, checkpoints, profiles, reports, trackers and resuming from a configuration, in place.

    Without the preemption hook, which would save a checkpoint, signals have their default effect.

    Args:
        cfg: the configuration of a Runner.
        work_dir: the folder for files that the run still writes.
    """
    for mode in ("val", "test"):
        for part in ("dataloader", "cfg", "evaluator"):
            cfg[f"{mode}_{part}"] = None
    hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None, "report": None, "preemption": None}
    cfg.default_hooks = {name: None if _writes_files(hook) else hook for name, hook in hooks.items()}
    cfg.custom_hooks = [hook for hook in cfg.get("custom_hooks") or () if not _writes_files(hook)]
    cfg.visualizer, cfg.resume, cfg.work_dir = None, False, str(work_dir)


def _hook_class(hook: Any) -> Any:
    """Return the class of a hook or of a hook config. If the config is invalid, the return value may not be a class."""
    kind = hook.get("type") if isinstance(hook, Mapping) else type(hook)
    return HOOKS.get(kind) if isinstance(kind, str) else kind


def _writes_files(hook: Any) -> bool:
    kind = _hook_class(hook)
    return isinstance(kind, type) and issubclass(kind, _WRITING_HOOKS)


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
        from slipstream.runner import Runner
        from slipstream.training.config_paths import at_user_paths

        _detach_workers(self.cfg["train_dataloader"])
        cfg = self.trial_config(folder)
        with at_user_paths(cfg):
            runner = Runner.from_cfg(cfg)
            if (options := runner.speed.compile) is not None and self.setting.compile_cache:
                options = replace(options, cache=self.setting.compile_cache)
                runner.speed = replace(runner.speed, compile=options)
            loader = runner.train_dataloader
            if self.setting.single_batch:
                batches = RepeatedBatches([next(iter(loader))], 10**9)
                runner.train_loop.dataloader = DataLoader(batches, batch_size=None)
            elif not self.setting.constant_lr:
                runner.train_loop.dataloader = _repeat_first_batches(loader, self.setting.batch_size)
            hook = _StepHook(observer)
            runner.register_hook(hook)
            observer.describe = lambda: {
                **_describe(runner.speed, runner.step, unwrap_model(runner.model), hook.shapes),
                **_describe_loader(loader),
                "steps_per_epoch": length(loader),
                "buffered": _buffered(loader) + (runner.speed.prefetch or 0),
                "samples": runner.train_loop.step_samples,
            }
            runner.train()

    def trial_config(self, folder: Path) -> Config:
        """Return the configuration of the trial, which writes only to `folder`."""
        cfg = Config(copy.deepcopy(dict(self.cfg)))
        cfg.launcher = "none"
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
        changes = self.setting.dataloader
        if self.setting.batch_size is not None:
            changes["drop_last"] = False  # keeps the samples of a dataset that is smaller than one batch
        if "dataloader" not in loader and changes.get("num_workers", loader.get("num_workers", 0)):
            changes["persistent_workers"] = True  # timed steps must not include worker startup
        return {**loader, **changes}


class _StepHook(Hook):
    """Calls the observer of a trial."""

    priority = "LOWEST"

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # The distinct batch shapes.
        self.shapes: set[Any] = set()

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


class RepeatedBatches(Dataset[Any]):
    """A dataset whose samples are whole batches. The batches are repeated until the dataset has `length` samples."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._batches[index % len(self._batches)]


class _FirstBatches(EpochBatchSampler):
    """Repeats the first batches of an epoch of `batches` endlessly; with a `size`, only batches of this size."""

    def __init__(self, batches: EpochBatchSampler, size: int | None) -> None:
        super().__init__(
            batches.batch_sampler, batches.seed, batches.samples, batches.use_sample_index, batches.limit,
            batches.shard,
        )  # fmt: skip
        self._size = size

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(islice(super().__iter__(), _NUM_REPEATED_BATCHES))
        if self._size is None:
            return cycle(batches)
        full = [batch for batch in batches if len(batch) == self._size]
        if not full:  # repeat a dataset that is smaller than one batch
            repeated = list(islice(cycle(chain(*batches)), self._size))
            full = [self._sample_batch(repeated, self.epoch) if self.use_sample_index else repeated]
        return cycle(full)


def _repeat_first_batches(loader: DataLoader[Any], size: int | None) -> DataLoader[Any]:
    """Return a copy of the loader that repeats its first batches in one pass, so that workers load continuously.

    Without a batch sampler, batches are not repeated; with a `size`, incomplete batches are then dropped.
    """
    if (order := order_of(loader)) is None:
        return loader if size is None else copied_loader(loader, drop_last=True)
    return copied_loader(loader, order=_FirstBatches(order, size))


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
        from slipstream.train_step import accelerate

        set_random_state(self.random_state)
        _detach_workers(self.loader)
        loader = changed_loader(self.loader, self.setting)
        speed = merged_speed(self.speed, self.setting.speed)
        if value := speed.get("compile"):
            own = {"scope": value} if isinstance(value, str) else {} if value is True else dict(value)
            speed["compile"] = {"cache": self.setting.compile_cache or True, **own}
        self.model.train()
        step = accelerate(self.model, self.optimizer, self.loss_fn, speed=speed)
        shapes: set[Any] = set()
        observer.describe = lambda: {
            **_describe(step.plan, step.inner, unwrap_model(step.model), shapes),
            **_describe_loader(loader),
            "steps_per_epoch": len(loader) if hasattr(loader, "__len__") else None,
        }
        for batch in _endless(loader):
            shapes.add(shapes_of(batch))
            observer.before_step(step.optim.param_groups)
            observer.after_step(total_loss(step(batch)), _has_updated(step.optim))


def changed_loader(loader: Any, setting: Setting) -> Any:
    """Return a loader with the batch size and the number of workers of `setting`; the same loader if both are None.

    Raises:
        ConfigError: the loader is not a plain `DataLoader` with a map-style dataset.
    """
    if setting.num_workers is None and setting.batch_size is None:
        return loader
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        kind = type(loader).__name__
        raise ConfigError(f"must be a torch DataLoader with a map-style dataset, not {kind}", "loader")
    workers = loader.num_workers if setting.num_workers is None else setting.num_workers
    batches: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if (size := setting.batch_size) is not None:
        samples = len(loader.dataset)  # type: ignore[arg-type]
        indices = [i % samples for i in range(max(size * _NUM_REPEATED_BATCHES, samples))]
        batches = {"sampler": indices, "batch_size": size, "drop_last": True}
    return DataLoader(
        loader.dataset, **batches, num_workers=workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, worker_init_fn=loader.worker_init_fn, generator=loader.generator,
        persistent_workers=workers > 0,
    )  # fmt: skip


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


def _describe(plan: SpeedPlan, step: Any, model: nn.Module, shapes: set[Any]) -> dict[str, Any]:
    """Return the properties of a run that the search reads after the warm-up."""
    return {
        "problem": _compile_problem(plan, step, model),
        "capabilities": Capabilities.here(next(model.parameters()).device.type, model),
        "sources": dict(plan.sources),
        "accumulate": plan.accumulate,
        "shapes": len(shapes),
    }


def _describe_loader(loader: Any) -> dict[str, Any]:
    return {"num_workers": getattr(loader, "num_workers", 0), "buffered": _buffered(loader)}


def _buffered(loader: Any) -> int:
    """Return the number of batches that a loader's workers can prefetch while the trial is paused."""
    return getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0)


def _compile_problem(plan: SpeedPlan, step: Any, model: nn.Module) -> str | None:
    """Return why the plan's compiled code is not in use, or None if it is in use."""
    if plan.compile is None or (isinstance(step, CompiledStep) and step.uses_graph):
        return None
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if compiled and plan.compile.scope not in (None, "step"):
        return None
    return "the step is not compiled; the log of `slipstream train` with this option states the reason"
