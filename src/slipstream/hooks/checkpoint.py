"""Save regular checkpoints and the best checkpoints, and remove old ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint import read_origin, remove_checkpoint, sharded_name
from slipstream.dist import is_main_process
from slipstream.errors import ConfigError
from slipstream.files import CHECKPOINT_NAME_LENGTH, check_name
from slipstream.hooks.hook import Hook, validation_count
from slipstream.hooks.schedule import Rule, infer_rule, metric_value, require_rule
from slipstream.registry import HOOKS
from slipstream.sharding import mesh_of
from slipstream.typecheck import check

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Save checkpoints every `interval` epochs or steps, and whenever a monitored metric improves.

    If validation runs within epochs, the best checkpoints are named by the number of steps.

    After saving a new best checkpoint, the hook calls `after_new_best(runner, metrics)` on all hooks that define it.

    Args:
        interval: number of epochs (with `by_epoch`) or steps between checkpoints; -1 saves only the last checkpoint.
        by_epoch: whether `interval` counts epochs rather than steps; by default, True if training is epoch-based.
        save_optimizer, save_param_scheduler: whether to save the states of the optimizer and the schedulers, which
            a resumed run requires.
        out_dir: parent folder for checkpoints, which are saved to a subfolder with the work_dir's name; by default
            they are saved to the work_dir.
        max_keep_ckpts: maximum number of regular checkpoints to keep; -1 keeps all. A resumed run does not remove
            checkpoints that an earlier run kept with a higher limit.
        save_last: save a checkpoint at the end of training, regardless of `interval`.
        save_best: one or more metrics, such as `loss`, or `NAME/loss` for the validation loader `NAME`, or `auto` for
            the first metric that validation returns. With `auto`, if neither the metric's name nor `rule` indicates
            whether higher values are better, a warning is logged and no best checkpoint is saved.
        rule: `greater` if higher values are better for all metrics, `less` if lower values are; by default what
            torchmetrics declares, or what the metrics' names imply.
        filename_tmpl: file name with `{}` in place of the number. Without `{}`, each checkpoint overwrites the
            previous one. Default: `epoch_{}.pth` or `iter_{}.pth`.
        save_begin: number of epochs or steps to wait before counting intervals.
        best_filename: file name of the best checkpoint, if `save_best` is a single metric; by default derived from the
            metric's name and the number of epochs or steps.
        save_epochs: epochs (counted from 1) after which to save an additional checkpoint that is never removed (such
            as `ckpt_epoch_1.pth`), as with SuperGradients' `save_ckpt_epoch_list`.
        max_keep_best: number of best checkpoints to keep for each metric; -1 keeps all that were among the best.
        consolidate: gather a sharded model on rank 0 and save one file instead of a folder of shards.
        async_save: write checkpoints in a background thread. This requires host memory for a copy of the checkpoint.
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
        async_save: bool = True,
        max_keep_best: int = 1,
    ) -> None:
        if interval == 0 or interval < -1:
            raise ConfigError(f"must be at least 1, or -1 (save only the last), not {interval}", "interval")
        if save_begin < 0:
            raise ConfigError(f"must be at least 0, not {save_begin}", "save_begin")
        for name, count in {"max_keep_ckpts": max_keep_ckpts, "max_keep_best": max_keep_best}.items():
            if count == 0 or count < -1:
                raise ConfigError(f"must be -1 (keep all) or at least 1, not {count}", name)
        self.interval, self.by_epoch, self.save_begin = interval, by_epoch, save_begin
        self.save_last, self.max_keep_ckpts, self.max_keep_best = save_last, max_keep_ckpts, max_keep_best
        self.out_dir = out_dir
        self.monitors = [save_best] if isinstance(save_best, str) else list(save_best or ())
        check(rule, Rule, "rule")
        self.rule = rule
        self.filename_tmpl, self.best_filename = filename_tmpl, best_filename
        self.save_epochs = frozenset(save_epochs)
        self._check_names()
        self._content: dict[str, Any] = {
            "save_optimizer": save_optimizer,
            "save_param_scheduler": save_param_scheduler,
            "consolidate": consolidate,
            "background": async_save,
        }
        self._warned = False

    def _check_names(self) -> None:
        try:
            name = (self.filename_tmpl or "_").format(0)
        except (LookupError, ValueError, AttributeError):
            raise ConfigError(
                f"must contain at most one {{}}, for the number, not {self.filename_tmpl!r}", "filename_tmpl"
            ) from None
        folder = "the checkpoint folder (set out_dir to use a different folder)"
        names = [(name, "filename_tmpl"), (self.best_filename, "best_filename")]
        names += [(f"best_{monitor}".replace("/", "_"), "save_best") for monitor in self.monitors]
        for file, key in names:
            if file is not None:
                check_name(file, key, folder, CHECKPOINT_NAME_LENGTH)
                if file.endswith(".safetensors"):
                    raise ConfigError(
                        "must end with .pth, because a run cannot resume from weights alone", key
                    )
        if self.best_filename is not None and len(self.monitors) != 1:
            raise ConfigError(
                f"requires exactly one metric in save_best, not {len(self.monitors)}", "best_filename"
            )
        if self.best_filename is not None and self.max_keep_best != 1:
            raise ConfigError("must be 1 if best_filename is set; remove one of them", "max_keep_best")
        if any(epoch < 1 for epoch in self.save_epochs):
            raise ConfigError(f"must be at least 1, not {min(self.save_epochs)}", "save_epochs")

    @property
    def async_save(self) -> bool:
        """Whether checkpoints are written in a thread while training continues."""
        return bool(self._content["background"])

    # ---- regular checkpoints ----------------------------------------------------------------------

    def before_train(self, runner: Runner) -> None:
        """Validate the options against the training loop and restore the list of kept checkpoints."""
        for monitor in self.monitors:
            if monitor != "auto":
                require_rule(self, runner, monitor)
        if self.by_epoch is None:
            self.by_epoch = runner.by_epoch
        if self.by_epoch and not runner.by_epoch:
            raise self.config_error("is True, but training is iteration-based; remove it", "by_epoch")
        if self.save_epochs and not self.by_epoch:
            raise self.config_error(
                "lists epochs, but checkpoints are saved by iteration; remove it", "save_epochs"
            )
        self._folder, self._run_id = self._folder_of(runner), runner.checkpoints.run_id
        runner.folder_lock.lock(self._folder, "out_dir")
        self._check_other_hooks(runner)
        kept = runner.message_hub.get_info(self._kept_key, [])
        # A longer list is from an earlier run with a higher limit; its checkpoints are not removed.
        self._kept: list[str] = kept if self.max_keep_ckpts < 0 or len(kept) <= self.max_keep_ckpts else []
        self._warn_about_earlier_run(runner)
        self._locate_best(runner)

    def _locate_best(self, runner: Runner) -> None:
        """If the run was resumed from another folder, name the best checkpoints there by their paths."""
        hub, source = runner.message_hub, runner.checkpoints.resumed_from
        if source is None or source.parent == self._folder:
            return
        for monitor in self.monitors:
            key = hub.get_info(self._auto_metric_key) if monitor == "auto" else monitor
            best, ranked = hub.get_info(f"best_ckpt/{key}"), hub.get_info(f"best_ckpts/{key}")
            if best is not None and ranked:
                hub.update_info(f"best_ckpt/{key}", str(source.parent / best))
                named = [[value, name and str(source.parent / name)] for value, name in ranked]
                hub.update_info(f"best_ckpts/{key}", named)

    def _warn_about_earlier_run(self, runner: Runner) -> None:
        """Warn if this run may overwrite checkpoints of an earlier run that it does not continue."""
        existing = min(self._folder.glob("*.pth"), default=None)
        if runner.checkpoints.resumed_from is not None or existing is None or not is_main_process():
            return
        if read_origin(existing)[0] != self._run_id:
            runner.logger.warning(
                f"CheckpointHook: {self._folder} contains checkpoints of an earlier run, such as {existing.name}. "
                "This run will overwrite checkpoints with the same names. To keep them, set a different work_dir; to "
                "continue the earlier run, set resume=True"
            )

    def _check_other_hooks(self, runner: Runner) -> None:
        for other in runner.hooks:
            if not isinstance(other, CheckpointHook) or other is self:
                continue
            if other._folder_of(runner) == self._folder and other._template == self._template:
                raise self.config_error(
                    "two CheckpointHooks use the same file names and would overwrite each other's checkpoints; set a "
                    "different filename_tmpl or out_dir in one of them",
                    "filename_tmpl",
                )
            if common := set(self.monitors) & set(other.monitors):
                raise self.config_error(
                    f"two CheckpointHooks monitor '{min(common)}'; remove it from one of them", "save_best"
                )

    def _folder_of(self, runner: Runner) -> Path:
        work_dir = Path(runner.work_dir)
        return Path(self.out_dir).expanduser().absolute() / work_dir.name if self.out_dir else work_dir

    @property
    def _template(self) -> str:
        return self.filename_tmpl or ("iter_{}.pth" if self.by_epoch is False else "epoch_{}.pth")

    @property
    def _kept_key(self) -> str:
        return f"kept_ckpts/{Path(self.out_dir or '') / self._template}"

    @property
    def _auto_metric_key(self) -> str:
        return f"best_metric/{Path(self.out_dir or '') / self._template}"

    def after_train_epoch(self, runner: Runner) -> None:
        """Save a checkpoint if one is due after this epoch."""
        last = self.save_last and self.is_last_train_epoch(runner)
        if self.by_epoch and (self.every_n_epochs(runner, self.interval, self.save_begin) or last):
            self._save_regular(runner, runner.epoch + 1)
        if runner.epoch + 1 in self.save_epochs:
            name = self._name(runner, f"ckpt_epoch_{runner.epoch + 1}.pth")
            self._save(runner, name, f"Saved checkpoint {name}", (), by_epoch=True)

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
        name = self._name(runner, self._template.format(number))
        self._kept = [kept for kept in self._kept if kept != name] + [name]
        surplus = self._kept[: -self.max_keep_ckpts] if self.max_keep_ckpts > 0 else []
        self._kept = self._kept[len(surplus) :]
        runner.message_hub.update_info(self._kept_key, self._kept)
        # A run cannot resume without the states of the optimizer and the schedulers.
        complete = bool(self._content["save_optimizer"] and self._content["save_param_scheduler"])
        message = f"Saved checkpoint {name}"
        self._save(runner, name, message, surplus, by_epoch=self.by_epoch, mark_last=complete)

    def _save(self, runner: Runner, name: str, message: str, surplus: Sequence[str], **options: Any) -> None:
        """Save a checkpoint; when it has been written, log `message` and remove the checkpoints in `surplus`."""

        def on_saved() -> None:
            runner.logger.info(message)
            for old in surplus:  # remove those that this run has written
                if not Path(old).is_absolute() and read_origin(self._folder / old)[0] == self._run_id:
                    remove_checkpoint(self._folder, old)

        runner.save_checkpoint(str(self._folder), name, **options, **self._content, on_saved=on_saved)

    def _name(self, runner: Runner, name: str) -> str:
        sharded = mesh_of(runner.model) is not None and not self._content["consolidate"]
        return sharded_name(name) if sharded else name

    # ---- best checkpoints -------------------------------------------------------------------------

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Save a checkpoint for each monitored metric that improved."""
        if not metrics or not runner.is_training:
            return
        for monitor in self.monitors:
            key = self._auto_metric(runner, metrics) if monitor == "auto" else monitor
            if key is not None and self._save_if_best(
                runner, key, metric_value(self, metrics, key, "save_best")
            ):
                if runner.hooks_at("after_new_best"):
                    runner.wait_for_checkpoint()
                runner.call_hook("after_new_best", metrics=metrics)

    def _auto_metric(self, runner: Runner, metrics: Mapping[str, Any]) -> str | None:
        """Return the metric that `auto` selects, or None if no metric can be monitored.

        The first validation run determines the metric; a metric that another hook monitors is not used. If it is
        unknown whether higher values are better, a warning is logged. This is not an error, because the metrics are not
        known before training.
        """
        key = runner.message_hub.get_info(self._auto_metric_key)  # a resumed run restores this value
        if not isinstance(key, str):
            key = next((name for name, value in metrics.items() if _is_number(value)), None)
            hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook) and hook is not self]
            if key is None or any(key in hook.monitors for hook in hooks):
                return None
            runner.message_hub.update_info(self._auto_metric_key, key)
        try:
            infer_rule(self, runner, key)
        except ConfigError:
            if not self._warned:
                runner.logger.warning(
                    f"CheckpointHook: no best checkpoint will be saved, because the name of the metric '{key}' does "
                    "not indicate whether higher values are better; set default_hooks.checkpoint.save_best and rule"
                )
            self._warned = True
            return None
        return key if _is_number(metrics.get(key)) else None

    def _save_if_best(self, runner: Runner, key: str, value: float) -> bool:
        """Save a checkpoint if the value is one of the best; return whether it is better than all earlier ones."""
        if not math.isfinite(value):
            return False
        hub = runner.message_hub
        count, unit = validation_count(runner, bool(self.by_epoch))
        name = self._name(runner, self.best_filename or f"best_{key.replace('/', '_')}_{unit}_{count}.pth")
        entry, limit = [value, name], self.max_keep_best if self.max_keep_best > 0 else None
        best = hub.get_info(f"best_score/{key}")
        first = [] if best is None else [[best, hub.get_info(f"best_ckpt/{key}")]]
        # Checkpoints beyond the limit are from an earlier run with a higher limit; they are not removed.
        previous = hub.get_info(f"best_ckpts/{key}", first)[:limit]
        # Sorting is stable, so the earlier checkpoint ranks first if values are equal.
        greater = infer_rule(self, runner, key) == "greater"
        kept = sorted([*previous, entry], key=lambda other: other[0], reverse=greater)[:limit]
        if entry in previous or entry not in kept:
            return False
        kept = [other for other in kept if other is entry or other[1] != name]
        hub.update_info(f"best_ckpts/{key}", kept)
        if is_best := kept[0] is entry:
            hub.update_info_dict({f"best_score/{key}": value, f"best_ckpt/{key}": name})
        rank = "" if is_best else f" number {kept.index(entry) + 1}"
        message = f"Saved the best checkpoint{rank} ({key} {value:.4f}) to {name}"
        surplus = [old for _, old in previous if old is not None and old not in [other[1] for other in kept]]
        # With by_epoch=None, the counters are saved as they are: they already include this epoch (or step).
        self._save(runner, name, message, surplus, by_epoch=None)
        return is_best


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
