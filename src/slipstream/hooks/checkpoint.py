"""When checkpoints are written, how many are kept, and which is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint import remove_checkpoint, sharded_name
from slipstream.dist import is_main_process
from slipstream.dist.sharding import mesh_of
from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook
from slipstream.hooks.schedule import better, pick
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["CheckpointHook"]


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Write checkpoints every `interval` epochs or steps, and whenever a metric is the best so far.

    Hooks with a method `after_new_best(runner, metrics)` are told of the latter, once it is written.

    Args:
        interval: epochs (`by_epoch`) or steps between two checkpoints; -1 writes none but the last.
        by_epoch: whether `interval` counts epochs; by default it counts what the training counts.
        save_optimizer, save_param_scheduler: whether they hold what a resumed run needs.
        out_dir: they are written to a folder in it that is called as the work_dir; by default the work_dir.
        max_keep_ckpts: how many of the regular ones are kept; -1 keeps all.
        save_last: write one at the end whatever the interval.
        save_best: a metric, several, or `auto` for the first that the validation gives.
        rule: whether `greater` or `less` is better, for all metrics; by default their names decide.
        filename_tmpl: with `{}` for the number, or without for one file that is replaced each time;
            `epoch_{}.pth` or `iter_{}.pth` by default.
        save_begin: write none before that many epochs or steps.
        best_filename: what the best is called, for one metric; by default by metric and number.
        save_epochs: epochs (the first is 1), as in SuperGradients' `save_ckpt_epoch_list`, whose checkpoints
            `ckpt_epoch_1.pth` stay beside the others.
        consolidate: of a sharded model, too, write one file, gathered by rank 0, instead of a folder of parts.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        interval: int = -1,
        by_epoch: bool | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | list[str] | None = None,
        rule: str | None = None,
        filename_tmpl: str | None = None,
        save_begin: int = 0,
        best_filename: str | None = None,
        save_epochs: Sequence[int] = (),
        consolidate: bool = False,
    ) -> None:
        if interval == 0 or interval < -1:
            raise ConfigError(f"must be at least 1, or -1 for none, not {interval}", "interval")
        if save_begin < 0:
            raise ConfigError(f"must not be negative, not {save_begin}", "save_begin")
        if max_keep_ckpts == 0 or max_keep_ckpts < -1:
            raise ConfigError(f"must be -1 (keep all) or at least 1, not {max_keep_ckpts}", "max_keep_ckpts")
        self.interval, self.by_epoch, self.save_begin = interval, by_epoch, save_begin
        self.save_last, self.max_keep_ckpts = save_last, max_keep_ckpts
        self.out_dir = out_dir
        self.monitors = [save_best] if isinstance(save_best, str) else list(save_best or ())
        self.rule = rule
        self.filename_tmpl, self.best_filename = filename_tmpl, best_filename
        self.save_epochs = frozenset(save_epochs)
        self._check_names()
        self._content: dict[str, Any] = {
            "save_optimizer": save_optimizer,
            "save_param_scheduler": save_param_scheduler,
            "consolidate": consolidate,
        }
        for monitor in self.monitors:
            if monitor != "auto":
                better(monitor, rule)

    def _check_names(self) -> None:
        try:
            (self.filename_tmpl or "").format(0)
        except (LookupError, ValueError):
            raise ConfigError(
                f"takes one {{}}, for the number, not {self.filename_tmpl!r}", "filename_tmpl"
            ) from None
        if self.best_filename is not None and len(self.monitors) != 1:
            raise ConfigError(
                f"names the best by one metric, but save_best has {len(self.monitors)}", "best_filename"
            )
        if any(epoch < 1 for epoch in self.save_epochs):
            raise ConfigError(f"epochs count from 1; there is none {min(self.save_epochs)}", "save_epochs")

    # ---- regular checkpoints ----------------------------------------------------------------------

    def before_train(self, runner: Runner) -> None:
        """Find out what is counted, and remember the files that a resumed run may have to remove."""
        if self.by_epoch is None:
            self.by_epoch = runner.by_epoch
        if self.by_epoch and not runner.by_epoch:
            raise self.wrong("counts epochs, but the training counts iterations: leave it out", "by_epoch")
        if self.save_epochs and not self.by_epoch:
            raise self.wrong("lists epochs, but the checkpoints count iterations", "save_epochs")
        if never := sorted(epoch for epoch in self.save_epochs if epoch > runner.max_epochs):
            runner.logger.warning(
                f"No checkpoint of the epochs {never}: the last of the training is {runner.max_epochs}"
            )
        work_dir = Path(runner.work_dir)
        out_dir = self.out_dir and Path(self.out_dir).expanduser().absolute()
        self._folder = out_dir / work_dir.name if out_dir else work_dir
        self._kept: list[str] = list(runner.message_hub.get_info("kept_ckpts", []))

    def after_train_epoch(self, runner: Runner) -> None:
        """Write a checkpoint if this epoch is due."""
        last = self.save_last and self.is_last_train_epoch(runner)
        if self.by_epoch and (self.every_n_epochs(runner, self.interval, self.save_begin) or last):
            self._save_regular(runner, runner.epoch + 1)
        if runner.epoch + 1 in self.save_epochs:
            self._save(runner, f"ckpt_epoch_{runner.epoch + 1}.pth")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Write a checkpoint if this step is due."""
        if self.by_epoch:
            return
        last = self.save_last and self.is_last_train_iter(runner)
        if self.every_n_train_iters(runner, self.interval, self.save_begin) or last:
            self._save_regular(runner, runner.iter + 1)

    def _save_regular(self, runner: Runner, number: int) -> None:
        template = self.filename_tmpl or ("epoch_{}.pth" if self.by_epoch else "iter_{}.pth")
        name = self._name(runner, template.format(number))
        self._kept = [kept for kept in self._kept if kept != name] + [name]
        surplus = self._kept[: -self.max_keep_ckpts] if self.max_keep_ckpts > 0 else []
        self._kept = self._kept[len(surplus) :]
        runner.message_hub.update_info("kept_ckpts", self._kept)
        self._save(runner, name, mark_last=True)
        if is_main_process():  # only now that the new one is on disk
            for old in surplus:
                remove_checkpoint(self._folder, old)

    def _save(self, runner: Runner, name: str, mark_last: bool = False) -> None:
        folder = str(self._folder)
        runner.save_checkpoint(folder, name, by_epoch=self.by_epoch, mark_last=mark_last, **self._content)
        runner.logger.info(f"Saved checkpoint {name}")

    def _name(self, runner: Runner, name: str) -> str:
        sharded = mesh_of(runner.model) is not None and not self._content["consolidate"]
        return sharded_name(name) if sharded else name

    # ---- best checkpoints -------------------------------------------------------------------------

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Write a checkpoint for each watched metric that is the best so far."""
        if not self.monitors or not metrics or not runner.is_training:
            return
        for monitor in self.monitors:
            key = next(iter(metrics)) if monitor == "auto" else monitor
            if self._save_if_best(runner, key, pick(self, metrics, key, "save_best")):
                runner.call_hook("after_new_best", metrics=metrics)

    def _save_if_best(self, runner: Runner, key: str, value: float) -> bool:
        hub = runner.message_hub
        best = hub.get_info(f"best_score/{key}")
        greater = self._rule(key) == "greater"
        improved = best is None or (value > best if greater else value < best)
        if not math.isfinite(value) or not improved:
            return False
        previous = hub.get_info(f"best_ckpt/{key}")
        count, by = (runner.epoch, "epoch") if self.by_epoch else (runner.iter, "iter")
        name = self._name(runner, self.best_filename or f"best_{key.replace('/', '_')}_{by}_{count}.pth")
        hub.update_info(f"best_score/{key}", value)
        hub.update_info(f"best_ckpt/{key}", name)
        # After the epoch (or step) is counted: by_epoch=None says that nothing is to be added.
        runner.save_checkpoint(str(self._folder), name, by_epoch=None, **self._content)
        runner.logger.info(f"The best checkpoint with {value:.4f} {key} is saved to {name}")
        if previous and previous != name and is_main_process():
            remove_checkpoint(self._folder, previous)
        return True

    def _rule(self, key: str) -> str:
        try:
            return better(key, self.rule)
        except ConfigError as error:  # of a metric that only `auto` has found
            raise self.wrong(str(error.args[0]), error.path) from None
