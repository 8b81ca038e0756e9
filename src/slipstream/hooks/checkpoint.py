"""Save regular checkpoints and the best checkpoints, and remove old ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint import read_origin, read_without_data, remove_checkpoint, sharded_name
from slipstream.dist import broadcast_object_list, is_main_process
from slipstream.errors import ConfigError
from slipstream.files import CHECKPOINT_NAME_LENGTH, check_name
from slipstream.hooks.hook import Hook
from slipstream.hooks.replaced_files import COPY_SEPARATOR, ReplacedFiles
from slipstream.hooks.schedule import infer_rule, metric_value
from slipstream.registry import HOOKS
from slipstream.sharding import mesh_of
from slipstream.typecheck import matches

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["CheckpointHook", "warn_without_checkpoints"]


_MAX_NAME_LENGTH = 100
"""Maximum number of characters in the name of a metric that `auto` can select."""


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Save checkpoints every `interval` epochs or steps, and whenever a monitored metric improves.

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
        save_best: one or more metrics, or `auto` for the first metric that validation returns. With `auto`, if
            neither the metric's name nor `rule` indicates whether higher values are better, a warning is logged and no
            best checkpoint is saved.
        rule: `greater` if higher values are better for all metrics, `less` if lower values are; by default inferred
            from the metrics' names.
        filename_tmpl: file name with `{}` in place of the number. Without `{}`, each checkpoint overwrites the
            previous one. Default: `epoch_{}.pth` or `iter_{}.pth`.
        save_begin: number of epochs or steps to wait before counting intervals.
        best_filename: file name of the best checkpoint, if `save_best` is a single metric; by default derived from the
            metric's name and the number of epochs or steps.
        save_epochs: epochs (counted from 1) after which to save an additional checkpoint that is never removed (such
            as `ckpt_epoch_1.pth`), as with SuperGradients' `save_ckpt_epoch_list`.
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
            "background": async_save,
        }
        self._warned = False
        self._replaced = ReplacedFiles(
            f"replaced_ckpts/{','.join(self.monitors)}", self._is_best, self._remove
        )
        for monitor in self.monitors:
            if monitor != "auto":
                infer_rule(monitor, rule)

    @property
    def async_save(self) -> bool:
        """Whether checkpoints are written in a thread while training continues."""
        return bool(self._content["background"])

    def _check_names(self) -> None:
        try:
            fields = [spec for _, _, spec, _ in Formatter().parse(self.filename_tmpl or "") if spec]
            if any(
                not re.fullmatch(r"0?\d{0,2}d?", spec) for spec in fields
            ):  # a large width such as {:>9999999999} would exhaust memory
                raise ValueError
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
        if self.best_filename is not None and len(self.monitors) != 1:
            raise ConfigError(
                f"requires exactly one metric in save_best, not {len(self.monitors)}", "best_filename"
            )
        if len({monitor.replace("/", "_") for monitor in self.monitors}) < len(self.monitors):
            raise ConfigError(
                f"contains metrics whose checkpoints would have the same name: {self.monitors}; remove one of them",
                "save_best",
            )
        if self.save_epochs and self.filename_tmpl == "ckpt_epoch_{}.pth":
            raise ConfigError(
                "must not be 'ckpt_epoch_{}.pth', because save_epochs uses this name", "filename_tmpl"
            )
        if any(epoch < 1 for epoch in self.save_epochs):
            raise ConfigError(
                f"must contain only epoch numbers that are at least 1, not {min(self.save_epochs)}",
                "save_epochs",
            )

    # ---- regular checkpoints ----------------------------------------------------------------------

    def before_train(self, runner: Runner) -> None:
        """Validate the options against the training loop and restore the list of kept checkpoints."""
        if self.by_epoch is None:
            self.by_epoch = runner.by_epoch
        if self.by_epoch and not runner.by_epoch:
            raise self.config_error("is True, but training is iteration-based; remove it", "by_epoch")
        if self.save_epochs and not self.by_epoch:
            raise self.config_error(
                "lists epochs, but checkpoints are saved by iteration; remove it", "save_epochs"
            )
        if unreachable := sorted(epoch for epoch in self.save_epochs if epoch > runner.max_epochs):
            runner.logger.warning(
                f"CheckpointHook: save_epochs contains {unreachable}, but training ends after epoch {runner.max_epochs}"
            )
        self._folder, self._run_id = self._folder_of(runner), runner.checkpoints.run_id
        runner.folder_lock.lock(self._folder, "out_dir")
        self._check_other_hooks(runner)
        self._saved_best: dict[str, str] = {}
        self._owns_files = runner.checkpoints.owns_files(self._folder, runner.work_dir)
        self._warn_about_kept(runner, self._restore_kept(runner))
        self._restore_best(runner)
        self._warn_about_earlier_run(runner)
        self._remove_surplus(runner)
        self._replaced.load(runner, self._folder, self._owns_files)

    def after_rollback(self, runner: Runner) -> None:
        """Restore the lists of kept and best checkpoints from the restored checkpoint."""
        self._restore_kept(runner)
        saved = self._saved_best
        best = {key: runner.message_hub.get_info(f"best_ckpt/{key}") for key in saved}
        self._replaced.restore(runner, saved.values(), filter(None, best.values()))
        self._saved_best = {key: name for key, name in best.items() if name is not None}

    def after_train(self, runner: Runner) -> None:
        """Remove the best checkpoints that were replaced by better ones."""
        self._replaced.remove_all()

    def _restore_kept(self, runner: Runner) -> list[str]:
        """Restore the list of kept checkpoints, and return the checkpoints that this run must not remove.

        If the list exceeds `max_keep_ckpts`, an earlier run kept the checkpoints with a higher limit. This run then
        applies the limit only to its own checkpoints.
        """
        names = self._names_in(runner, self._kept_key)
        within_limit = self.max_keep_ckpts < 0 or len(names) <= self.max_keep_ckpts
        self._kept: list[str] = names if within_limit else []
        return [] if within_limit else names

    def _restore_best(self, runner: Runner) -> None:
        """Restore best scores that this run found after it had saved the checkpoint from which it resumes.

        The run validated after its last checkpoint. If it is now longer, that validation may not be due again.
        """
        if runner.checkpoints.resumed_from is None or not self.monitors:
            return
        found = [self._best_in_folder(runner) if is_main_process() else {}]
        broadcast_object_list(found)
        for key, (score, name) in found[0].items():
            with suppress(ConfigError):  # of a metric without a rule, about which `_auto_metric` warns
                if self._is_improvement(key, score, runner.message_hub.get_info(f"best_score/{key}")):
                    runner.message_hub.update_info(f"best_score/{key}", score)
                    runner.message_hub.update_info(f"best_ckpt/{key}", name)

    def _best_in_folder(self, runner: Runner) -> dict[str, tuple[float, str]]:
        """Return the scores and names of the best checkpoints that this run saved at the current iteration."""
        names = sorted(path.name for path in self._folder.iterdir())
        if self.best_filename is not None:  # may be in a subfolder
            names += [self.best_filename, sharded_name(self.best_filename)]
        found: dict[str, tuple[float, str]] = {}
        for name in filter(self._is_best, names):
            path = self._folder / name
            if not path.exists() or read_origin(path) != (self._run_id, runner.iter):
                continue
            hub = read_without_data(path).get("message_hub")
            info = hub.get("runtime_info") if isinstance(hub, Mapping) else None
            if not isinstance(info, Mapping):
                continue
            for monitor in self.monitors:
                key = info.get(self._auto_metric_key) if monitor == "auto" else monitor
                score = info.get(f"best_score/{key}")
                if info.get(f"best_ckpt/{key}") == name and isinstance(score, Real):
                    found[str(key)] = float(score), name
        return found

    def _warn_about_kept(self, runner: Runner, names: Sequence[str]) -> None:
        existing = [name for name in names if (self._folder / name).exists()]
        if existing:
            runner.logger.warning(
                f"CheckpointHook: max_keep_ckpts={self.max_keep_ckpts} does not apply to {', '.join(existing)} in "
                f"{self._folder}, because an earlier run kept them with a higher limit; remove the files that you do "
                "not need"
            )

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

    def _remove_surplus(self, runner: Runner) -> None:
        """Remove old files that an earlier run had replaced, but could not remove before it was killed."""
        path = runner.checkpoints.resumed_from
        if path is None or not is_main_process():
            return
        for name in self._names_in(runner, self._surplus_key):
            _, iteration = read_origin(self._folder / name)
            is_older = iteration is not None and iteration < runner.iter
            if name not in self._kept and is_older and self._remove(self._folder, name):
                runner.logger.info(f"Removed {name}, which was replaced by {path.name}")

    def _names_in(self, runner: Runner, key: str) -> list[str]:
        """Return the names in the resumed checkpoint's list `key` that this hook could give to regular checkpoints."""
        names = runner.message_hub.get_info(key, []) if self._owns_files else []
        if not matches(names, list[str]):
            return []
        return [name for name in names if self._is_regular(runner, name)]

    def _check_other_hooks(self, runner: Runner) -> None:
        for other in runner.hooks:
            if not isinstance(other, CheckpointHook) or other is self:
                continue
            if other._folder_of(runner).resolve() == self._folder.resolve() and self._same_name(other):
                raise self.config_error(
                    "two CheckpointHooks use the same file names (filename_tmpl, best_filename or save_epochs) and "
                    "would overwrite each other's checkpoints; set a different name or out_dir in one of them",
                    "filename_tmpl",
                )
            if common := set(self.monitors) & set(other.monitors):
                raise self.config_error(
                    f"two CheckpointHooks monitor '{min(common)}'; remove it from one of them",
                    "save_best",
                )

    def _same_name(self, other: CheckpointHook) -> bool:
        best = self.best_filename is not None and self.best_filename == other.best_filename
        return self._template == other._template or best or bool(self.save_epochs & other.save_epochs)

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
    def _surplus_key(self) -> str:
        return f"surplus_ckpts/{Path(self.out_dir or '') / self._template}"

    @property
    def _auto_metric_key(self) -> str:
        return f"best_metric/{Path(self.out_dir or '') / self._template}"

    def _is_regular(self, runner: Runner, name: str) -> bool:
        """Return whether a regular checkpoint of this hook can have this name."""
        numbers = map(int, re.findall(r"\d+", name))
        return any(self._name(runner, self._template.format(number)) == name for number in [0, *numbers])

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

    def after_skipped_iter(self, runner: Runner, batch_idx: int) -> None:
        """Save a checkpoint if one is due after this batch."""
        self.after_train_iter(runner, batch_idx)

    def _save_regular(self, runner: Runner, number: int) -> None:
        name = self._name(runner, self._template.format(number))
        self._kept = [kept for kept in self._kept if kept != name] + [name]
        surplus = self._kept[: -self.max_keep_ckpts] if self.max_keep_ckpts > 0 else []
        self._kept = self._kept[len(surplus) :]
        runner.message_hub.update_info(self._kept_key, self._kept)
        # If the run is killed before removing the surplus files, a run that resumes from this checkpoint removes them.
        runner.message_hub.update_info(self._surplus_key, surplus)
        self._save(
            runner,
            name,
            f"Saved checkpoint {name}",
            [*surplus, *self._replaced.unused(runner)],
            by_epoch=self.by_epoch,
            mark_last=self.is_complete,
        )

    @property
    def is_complete(self) -> bool:
        """Whether a run can resume from the checkpoints."""
        return bool(self._content["save_optimizer"] and self._content["save_param_scheduler"])

    def _save(self, runner: Runner, name: str, message: str, surplus: Sequence[str], **options: Any) -> None:
        """Save a checkpoint; when it has been written, log `message` and remove the checkpoints in `surplus`."""

        def on_saved() -> None:
            runner.logger.info(message)
            for old in surplus:
                self._remove(self._folder, old)

        runner.save_checkpoint(str(self._folder), name, **options, **self._content, on_saved=on_saved)

    def _remove(self, folder: Path, name: str) -> bool:
        """Remove a checkpoint and return True if this run wrote it; otherwise, return False."""
        if read_origin(folder / name)[0] != self._run_id:
            return False
        remove_checkpoint(folder, name)
        return True

    def _name(self, runner: Runner, name: str) -> str:
        sharded = mesh_of(runner.model) is not None and not self._content["consolidate"]
        return sharded_name(name) if sharded else name

    # ---- best checkpoints -------------------------------------------------------------------------

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Save a checkpoint for each monitored metric that improved."""
        if not self.monitors or not metrics or not runner.is_training:
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

        The first validation run determines the metric; a metric that another hook monitors is not used. If the metric's
        value is not a number, or it is unknown whether higher values are better, the result is None and a warning is
        logged. This is not an error, because the metrics are not known before training.
        """
        key = runner.message_hub.get_info(self._auto_metric_key)  # a resumed run restores this value
        if not isinstance(key, str):
            key = next((name for name, value in metrics.items() if _can_monitor(name, value)), None)
            hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook) and hook is not self]
            if key is None or any(key in hook.monitors for hook in hooks):
                return None
            runner.message_hub.update_info(self._auto_metric_key, key)
        try:
            infer_rule(key, self.rule)
            problem = None if _can_monitor(key, metrics.get(key)) else "does not have a numeric value"
        except ConfigError:
            problem = "has a name that does not indicate whether higher values are better"
        if problem is not None and not self._warned:
            self._warned = True
            runner.logger.warning(
                f"CheckpointHook: no best checkpoint will be saved, because the metric '{key}' {problem}; set "
                "default_hooks.checkpoint.save_best and rule"
            )
        return key if problem is None else None

    def _save_if_best(self, runner: Runner, key: str, value: float) -> bool:
        hub = runner.message_hub
        if not self._is_improvement(key, value, hub.get_info(f"best_score/{key}")):
            return False
        previous = hub.get_info(f"best_ckpt/{key}")
        prefix = f"best_{key.replace('/', '_')}_{'epoch' if self.by_epoch else 'iter'}_"
        count = runner.epoch if self.by_epoch else runner.iter
        name = self._name(runner, self.best_filename or f"{prefix}{count}.pth")
        hub.update_info(f"best_score/{key}", value)
        hub.update_info(f"best_ckpt/{key}", name)
        # The name of the previous best checkpoint may come from the resumed checkpoint and refer to a file that this
        # hook did not write.
        owns_previous = key in self._saved_best or self._owns_files
        surplus = (
            self._replace(runner, previous, name)
            if owns_previous and previous and self._is_best(previous)
            else []
        )
        self._saved_best[key] = name
        message = f"Saved the best checkpoint ({key} {value:.4f}) to {name}"
        # With by_epoch=None, the counters are saved as they are: they already include this epoch (or step).
        self._save(runner, name, message, surplus, by_epoch=None)
        return True

    def _is_improvement(self, key: str, value: float, best: float | None) -> bool:
        greater = infer_rule(key, self.rule) == "greater"
        return math.isfinite(value) and (best is None or (value > best if greater else value < best))

    def _replace(self, runner: Runner, previous: str, name: str) -> list[str]:
        """Return the checkpoints to remove when `name`, which replaces `previous`, has been written."""
        if not runner.rollback.faults:
            return [previous] if previous != name else []
        runner.wait_for_checkpoint()
        if previous == name:
            self._replaced.set_aside(runner, name)
        else:
            self._replaced.add(runner, previous)
        return self._replaced.unused(runner)

    def _is_best(self, name: str) -> bool:
        """Return whether a best checkpoint of this hook can have this name."""
        keys = [".+" if key == "auto" else re.escape(key.replace("/", "_")) for key in self.monitors]
        stems = [rf"best_{key}_(epoch|iter)_\d+" for key in keys]
        if self.best_filename is not None:
            stems.append(re.escape(Path(self.best_filename).with_suffix("").as_posix()))
        stem = Path(name).with_suffix("").as_posix()
        return re.fullmatch(rf"({'|'.join(stems)})({COPY_SEPARATOR}\d+)?", stem) is not None


def _can_monitor(name: Any, value: Any) -> bool:
    """Return whether a metric's value is a single number, and its name can be part of a file name."""
    if not isinstance(name, str) or "\0" in name or len(name) > _MAX_NAME_LENGTH:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta and not value.is_complex()
    if not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def warn_without_checkpoints(runner: Runner, option: str) -> None:
    """Warn if no CheckpointHook saves resumable checkpoints (see `is_complete`) during training."""
    hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
    if not any(hook.interval > 0 and hook.is_complete for hook in hooks):
        runner.logger.warning(
            f"{option} rolls back to the last checkpoint, but no CheckpointHook saves complete checkpoints during "
            "training; set default_hooks.checkpoint.interval"
        )
