"""Base class, stages and priorities of hooks, and the list of a run's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.dataset.loading.loader import length
from slipstream.errors import ConfigError, did_you_mean
from slipstream.registry import HOOKS
from slipstream.typecheck import matches, short_repr

if TYPE_CHECKING:
    from slipstream.runner import Runner


class Priority(IntEnum):
    """Execution order of hooks within a stage; hooks with lower numbers run first."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority) -> int:
    """Return a priority as a number, given a `Priority`, its name, or a number from 0 to 100."""
    if isinstance(priority, str) and priority.upper() in Priority.__members__:
        return int(Priority[priority.upper()])
    if not matches(priority, int) or not 0 <= int(priority) <= 100:
        hint = did_you_mean(str(priority), Priority.__members__)
        raise ConfigError(
            f"a hook priority must be one of {', '.join(Priority.__members__)}, or an int between 0 and 100, not "
            f"{short_repr(priority)}{hint}"
        )
    return int(priority)


class Hook:
    """Base class for hooks. The Runner calls only the stages that a subclass overrides.

    `_before_epoch`, `_after_epoch`, `_before_iter` and `_after_iter` run in all three modes (`mode` is `train`, `val`
    or `test`), unless the method for a mode is overridden. The outputs of a training step are device tensors.
    Reading an output synchronizes with the device.
    """

    priority: int | str = "NORMAL"
    runs_last: ClassVar[bool] = False
    """Whether the hook runs after all hooks without this flag, regardless of priority. Set this flag for hooks that may
    end the run."""
    reads_phases: ClassVar[bool] = False
    """Whether the hook reads `runner.phases`. The phases are timed only if a hook reads them."""
    sets_learning_rate: ClassVar[bool] = False
    """Whether the hook sets the learning rate during training. If so, a resumed run does not compare the configured
    learning rate with that of the checkpoint."""
    source: Mapping[str, Any] | None = None
    """The configuration from which the hook was built, used to locate errors in the user config."""
    stages: ClassVar[tuple[str, ...]] = (
        "before_run", "after_load_checkpoint", "before_train", "before_train_epoch", "before_train_iter",
        "after_train_iter", "after_train_epoch", "before_val", "before_val_epoch", "before_val_iter",
        "after_val_iter", "after_val_epoch", "after_val", "before_save_checkpoint", "after_train",
        "before_test", "before_test_epoch", "before_test_iter", "after_test_iter", "after_test_epoch",
        "after_test", "after_run",
    )  # fmt: skip

    def before_run(self, runner: Runner) -> None:
        """Called before the run starts."""

    def after_run(self, runner: Runner) -> None:
        """Called after the run ends."""

    def before_train(self, runner: Runner) -> None:
        """Called before the first epoch."""

    def after_train(self, runner: Runner) -> None:
        """Called after the last epoch."""

    def before_val(self, runner: Runner) -> None:
        """Called before validation."""

    def after_val(self, runner: Runner) -> None:
        """Called after validation."""

    def before_test(self, runner: Runner) -> None:
        """Called before testing."""

    def after_test(self, runner: Runner) -> None:
        """Called after testing."""

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Called before `checkpoint` is written; the hook may modify it."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Called after `checkpoint` is read and before the model loads it; the hook may modify it."""

    def before_train_epoch(self, runner: Runner) -> None:
        """Called before a training epoch."""
        self._before_epoch(runner, "train")

    def after_train_epoch(self, runner: Runner) -> None:
        """Called after a training epoch, before `runner.epoch` is incremented."""
        self._after_epoch(runner, "train")

    def before_val_epoch(self, runner: Runner) -> None:
        """Called before a pass over the validation data."""
        self._before_epoch(runner, "val")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Called after a pass over the validation data, with its metrics."""
        self._after_epoch(runner, "val")

    def before_test_epoch(self, runner: Runner) -> None:
        """Called before a pass over the test data."""
        self._before_epoch(runner, "test")

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Called after a pass over the test data, with its metrics."""
        self._after_epoch(runner, "test")

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Called before a training step."""
        self._before_iter(runner, batch_idx, data_batch, "train")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Called after a training step, before `runner.iter` is incremented."""
        self._after_iter(runner, batch_idx, data_batch, outputs, "train")

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Called before a validation batch."""
        self._before_iter(runner, batch_idx, data_batch, "val")

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Called after a validation batch."""
        self._after_iter(runner, batch_idx, data_batch, outputs, "val")

    def before_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Called before a test batch."""
        self._before_iter(runner, batch_idx, data_batch, "test")

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Called after a test batch."""
        self._after_iter(runner, batch_idx, data_batch, outputs, "test")

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        pass

    def _after_epoch(self, runner: Runner, mode: str = "train") -> None:
        pass

    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = "train"
    ) -> None:
        pass

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        pass

    def release(self, runner: Runner) -> None:
        """Called at the end of each run, even after an error, to release the hook's resources."""

    # ---- intervals ------------------------------------------------------------------------------------

    def every_n_epochs(self, runner: Runner, n: int, start: int = 0) -> bool:
        """Return whether the current epoch is the n-th, 2n-th, ... after `start`."""
        done = runner.epoch + 1 - start
        return n > 0 and done > 0 and done % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Return whether the batch is the n-th, 2n-th, ... of its epoch."""
        return n > 0 and (batch_idx + 1) % n == 0

    def every_n_train_iters(self, runner: Runner, n: int, start: int = 0) -> bool:
        """Return whether the current step is the n-th, 2n-th, ... of the run after `start`."""
        done = runner.iter + 1 - start
        return n > 0 and done > 0 and done % n == 0

    def end_of_epoch(self, dataloader: Any, batch_idx: int) -> bool:
        """Return whether the batch is the last batch of `dataloader`."""
        return batch_idx + 1 == length(dataloader)

    def is_last_train_epoch(self, runner: Runner) -> bool:
        """Return whether the current epoch is the last epoch of the run."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_train_iter(self, runner: Runner) -> bool:
        """Return whether the current step is the last step of the run."""
        return runner.iter + 1 == runner.max_iters

    def config_error(self, message: str, option: str) -> ConfigError:
        """Return the error to raise for an option that is found to be invalid during the run."""
        error = ConfigError(message, option)
        error.source = self.source
        return error

    def method_at(self, stage: str) -> Callable[..., None] | None:
        """Return this hook's method for `stage`, or None if the hook does not override it."""
        method = getattr(self, stage, None)
        if method is None or getattr(method, "__func__", None) is not getattr(Hook, stage, None):
            return method
        prefix, _, event = stage.partition("_")
        mode, _, event = event.partition("_")
        general = f"_{prefix}_{event}"
        has_general = mode in ("train", "val", "test") and hasattr(Hook, general)
        return method if has_general and getattr(type(self), general) is not getattr(Hook, general) else None


def validation_count(runner: Runner, by_epoch: bool) -> tuple[int, str]:
    """Return the number that identifies the current validation run, and its unit, `epoch` or `iter`.

    Args:
        runner: the Runner.
        by_epoch: whether to count epochs; if validation also runs within epochs, steps are counted instead.
    """
    runs = getattr(runner.loops.get_if_built("train"), "validations_per_epoch", 1)
    return (runner.epoch, "epoch") if by_epoch and runs == 1 else (runner.iter, "iter")


class HookList:
    """A list of hooks, sorted by priority and then by order of registration."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        # The methods that implement a stage, in execution order, by stage.
        self.methods = _Methods(self)

    def register(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a `Hook`, or build one from a configuration (which may contain `priority`) and add it.

        Raises:
            ConfigError: if `hook` is neither a hook nor a valid configuration.
        """
        source = hook
        try:
            if isinstance(source, Mapping):
                priority = source.get("priority", priority)
                hook = HOOKS.build({key: value for key, value in source.items() if key != "priority"})
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"a hook must be a slipstream.hooks.Hook or a dict with a 'type', not {short_repr(hook)}"
                )
            if isinstance(source, Mapping):
                hook.source = source
            if priority is not None:
                hook.priority = priority
            order = _order(hook)
        except ConfigError as error:
            if isinstance(source, Mapping):
                # The identity of this dict is used to locate the error in the user config.
                error.source = source
            raise
        position = sum(_order(other) <= order for other in self._hooks)
        self._hooks.insert(position, hook)
        self.methods.clear()

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)


class _Methods(dict[str, list[Callable[..., None]]]):
    """Finds the methods of each stage once, without a function call for later look-ups."""

    def __init__(self, hooks: HookList) -> None:
        self._hooks = hooks

    def __missing__(self, stage: str) -> list[Callable[..., None]]:
        self[stage] = [method for hook in self._hooks if (method := hook.method_at(stage)) is not None]
        return self[stage]


def _order(hook: Hook) -> tuple[bool, int]:
    return hook.runs_last, get_priority(hook.priority)
