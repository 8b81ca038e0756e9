"""What happens around steps: the base class of hooks, and their stages and priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.dataset.loading.loader import length
from slipstream.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["Hook", "Priority", "get_priority"]


class Priority(IntEnum):
    """When a hook runs within a stage: lower numbers first."""

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
    """Return the number of a priority given by name or as a number from 0 to 100."""
    if isinstance(priority, str):
        if priority.upper() not in Priority.__members__:
            hint = did_you_mean(priority, Priority.__members__)
            raise ConfigError(f"there is no hook priority '{priority}'{hint}")
        return int(Priority[priority.upper()])
    if not 0 <= priority <= 100:
        raise ConfigError(f"a hook priority lies between 0 and 100, not {priority}")
    return int(priority)


class Hook:
    """Override the stages in which something shall happen; the Runner calls only those.

    `_before_epoch`, `_after_epoch`, `_before_iter` and `_after_iter` serve all three modes (`mode` is
    `train`, `val` or `test`) unless a mode's own method is overridden. Outputs of a training step are
    device tensors: reading one makes the step wait.
    """

    priority: int | str = "NORMAL"
    source: Mapping[str, Any] | None = None
    """The configuration that the hook was built from, by which errors find their place."""
    stages: ClassVar[tuple[str, ...]] = (
        "before_run", "after_load_checkpoint", "before_train", "before_train_epoch", "before_train_iter",
        "after_train_iter", "after_train_epoch", "before_val", "before_val_epoch", "before_val_iter",
        "after_val_iter", "after_val_epoch", "after_val", "before_save_checkpoint", "after_train",
        "before_test", "before_test_epoch", "before_test_iter", "after_test_iter", "after_test_epoch",
        "after_test", "after_run",
    )  # fmt: skip

    def before_run(self, runner: Runner) -> None:
        """Before anything runs."""

    def after_run(self, runner: Runner) -> None:
        """After everything ran."""

    def before_train(self, runner: Runner) -> None:
        """Before the first epoch."""

    def after_train(self, runner: Runner) -> None:
        """After the last epoch."""

    def before_val(self, runner: Runner) -> None:
        """Before validation."""

    def after_val(self, runner: Runner) -> None:
        """After validation."""

    def before_test(self, runner: Runner) -> None:
        """Before the test."""

    def after_test(self, runner: Runner) -> None:
        """After the test."""

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Before `checkpoint` is written; may change it."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """After `checkpoint` was read, before the model takes it; may change it."""

    def before_train_epoch(self, runner: Runner) -> None:
        """Before an epoch of training."""
        self._before_epoch(runner, "train")

    def after_train_epoch(self, runner: Runner) -> None:
        """After an epoch of training; `runner.epoch` still counts the epochs before it."""
        self._after_epoch(runner, "train")

    def before_val_epoch(self, runner: Runner) -> None:
        """Before a pass over the validation data."""
        self._before_epoch(runner, "val")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """After a pass over the validation data, with its metrics."""
        self._after_epoch(runner, "val")

    def before_test_epoch(self, runner: Runner) -> None:
        """Before a pass over the test data."""
        self._before_epoch(runner, "test")

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """After a pass over the test data, with its metrics."""
        self._after_epoch(runner, "test")

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Before a training step."""
        self._before_iter(runner, batch_idx, data_batch, "train")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """After a training step; `runner.iter` still counts the steps before it."""
        self._after_iter(runner, batch_idx, data_batch, outputs, "train")

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Before a validation batch."""
        self._before_iter(runner, batch_idx, data_batch, "val")

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """After a validation batch."""
        self._after_iter(runner, batch_idx, data_batch, outputs, "val")

    def before_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Before a test batch."""
        self._before_iter(runner, batch_idx, data_batch, "test")

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """After a test batch."""
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

    # ---- when ------------------------------------------------------------------------------------

    def every_n_epochs(self, runner: Runner, n: int, start: int = 0) -> bool:
        """Say whether the epoch that ends now is the n-th, 2n-th, ... after `start`."""
        done = runner.epoch + 1 - start
        return n > 0 and done > 0 and done % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Say whether the batch is the n-th, 2n-th, ... of its epoch."""
        return n > 0 and (batch_idx + 1) % n == 0

    def every_n_train_iters(self, runner: Runner, n: int, start: int = 0) -> bool:
        """Say whether the step that ends now is the n-th, 2n-th, ... of the run after `start`."""
        done = runner.iter + 1 - start
        return n > 0 and done > 0 and done % n == 0

    def end_of_epoch(self, dataloader: Any, batch_idx: int) -> bool:
        """Say whether the batch is the loader's last."""
        return batch_idx + 1 == length(dataloader)

    def is_last_train_epoch(self, runner: Runner) -> bool:
        """Say whether the epoch that ends now is the run's last."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_train_iter(self, runner: Runner) -> bool:
        """Say whether the step that ends now is the run's last."""
        return runner.iter + 1 == runner.max_iters

    def wrong(self, message: str, option: str) -> ConfigError:
        """Return the error to raise when an option turns out to be wrong while the run is under way."""
        error = ConfigError(message, option)
        error.source = self.source  # type: ignore[attr-defined]
        return error

    def method_at(self, stage: str) -> Callable[..., None] | None:
        """Return this hook's method for `stage`, or None if it does nothing there."""
        method = getattr(self, stage, None)
        if method is None or getattr(method, "__func__", None) is not getattr(Hook, stage, None):
            return method
        before, _, what = stage.partition("_")
        mode, _, what = what.partition("_")
        general = f"_{before}_{what}"
        served = mode in ("train", "val", "test") and hasattr(Hook, general)
        return method if served and getattr(type(self), general) is not getattr(Hook, general) else None
