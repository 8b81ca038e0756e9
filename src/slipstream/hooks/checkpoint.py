"""Save regular checkpoints and the best checkpoints, and remove old ones."""

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
    """Save checkpoints every `interval` epochs or steps, and whenever a metric improves.

    After saving a new best checkpoint, the hook calls `after_new_best(runner, metrics)` of all hooks that define it.

    Args:
        interval: epochs (`by_epoch`) or steps between two checkpoints; -1 saves only the last one.
        by_epoch: whether `interval` counts epochs rather than steps; by default as in the training loop.
        save_optimizer, save_param_scheduler: whether to save the states of optimizer and schedulers, which
            a resumed run requires.
        out_dir: parent folder for checkpoints, which are saved to a subfolder with the work_dir's name; by default
            they are saved to the work_dir.
        max_keep_ckpts: maximum number of regular checkpoints to keep; -1 keeps all.
        save_last: save a checkpoint at the end of training, regardless of `interval`.
        save_best: one or more metrics, or `auto` for the first metric that validation returns.
        rule: `greater` if higher values are better for all metrics, `less` if lower values are; by default inferred
            from the metrics' names.
        filename_tmpl: file name with `{}` in place of the number. Without `{}`, each checkpoint overwrites the
            previous one. Default: `epoch_{}.pth` or `iter_{}.pth`.
        save_begin: number of epochs or steps after which `interval` starts to count.
        best_filename: file name of the best checkpoint, if `save_best` is a single metric; by default derived from the
            metric's name and the number of epochs or steps.
        save_epochs: epochs (counted from 1) after which to save an additional checkpoint (`ckpt_epoch_1.pth`) that is
            never removed, as with SuperGradients' `save_ckpt_epoch_list`.
        consolidate: gather a sharded model on rank 0 and save one file instead of a folder of shards.
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
            raise ConfigError(f"must be at least 1, or -1 (save only the last), not {interval}", "interval")
        if save_begin < 0:
            raise ConfigError(f"must be at least 0, not {save_begin}", "save_begin")
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
                f"must contain at most one {{}}, for the number, not {self.filename_tmpl!r}", "filename_tmpl"
            ) from None
        if self.best_filename is not None and len(self.monitors) != 1:
            raise ConfigError(
                f"requires exactly one metric in save_best, not {len(self.monitors)}", "best_filename"
            )
        if any(epoch < 1 for epoch in self.save_epochs):
            raise ConfigError(
                f"must contain only epochs of 1 or more, not {min(self.save_epochs)}", "save_epochs"
            )

    # ---- regular checkpoints ----------------------------------------------------------------------

    def before_train(self, runner: Runner) -> None:
        """Validate the options against the training loop and restore the list of kept checkpoints."""
        if self.by_epoch is None:
            self.by_epoch = runner.by_epoch
        if self.by_epoch and not runner.by_epoch:
            raise self.wrong("is True, but training is iteration-based; remove it", "by_epoch")
        if self.save_epochs and not self.by_epoch:
            raise self.wrong("lists epochs, but checkpoints are saved by iteration; remove it", "save_epochs")
        if never := sorted(epoch for epoch in self.save_epochs if epoch > runner.max_epochs):
            runner.logger.warning(
                f"CheckpointHook: save_epochs contains {never}, but training ends after epoch {runner.max_epochs}"
            )
        work_dir = Path(runner.work_dir)
        out_dir = self.out_dir and Path(self.out_dir).expanduser().absolute()
        self._folder = out_dir / work_dir.name if out_dir else work_dir
        self._kept: list[str] = list(runner.message_hub.get_info("kept_ckpts", []))

    def after_train_epoch(self, runner: Runner) -> None:
        """Save a checkpoint if one is due after this epoch."""
        last = self.save_last and self.is_last_train_epoch(runner)
        if self.by_epoch and (self.every_n_epochs(runner, self.interval, self.save_begin) or last):
            self._save_regular(runner, runner.epoch + 1)
        if runner.epoch + 1 in self.save_epochs:
            self._save(runner, f"ckpt_epoch_{runner.epoch + 1}.pth")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Save a checkpoint if one is due after this step."""
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
        if is_main_process():  # remove old checkpoints only after the new one is on disk
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
        """Save a checkpoint for each monitored metric that improved."""
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
        # by_epoch=None, because the epoch (or step) is already counted.
        runner.save_checkpoint(str(self._folder), name, by_epoch=None, **self._content)
        runner.logger.info(f"Saved the best checkpoint ({key} {value:.4f}) to {name}")
        if previous and previous != name and is_main_process():
            remove_checkpoint(self._folder, previous)
        return True

    def _rule(self, key: str) -> str:
        try:
            return better(key, self.rule)
        except ConfigError as error:  # `auto` selects the metric only after the first validation run
            raise self.wrong(str(error.args[0]), error.path) from None
