"""Average the weights of the best epochs into one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.checkpoint import (
    load_checkpoint,
    remove_checkpoint,
    weights_in,
    write_checkpoint,
)
from slipstream.config import config_text
from slipstream.dist import broadcast_object_list, is_main_process
from slipstream.files import CHECKPOINT_NAME_LENGTH, check_name
from slipstream.hooks.ema import validation_weights
from slipstream.hooks.hook import Hook, validation_count
from slipstream.hooks.schedule import Rule, metric_value, require_rule
from slipstream.registry import HOOKS
from slipstream.sharding import shard_like
from slipstream.typecheck import PositiveInt, check

if TYPE_CHECKING:
    from slipstream.runner import Runner

FOLDER = "average_best"


@HOOKS.register_module()
class AverageBestHook(Hook):
    """Average the weights of the best epochs at the end of training; save and validate the result.

    The hook averages the weights used for validation, which are the EMA weights if there is an `EMAHook`. It saves the
    weights of each of the best epochs to a file in the `average_best` folder of the work_dir, and keeps these files,
    because a resumed run requires them. The hook calls the stages `before_average_val`
    and `after_average_val` (with `metrics`) before and after the final validation. Floating-point tensors are averaged
    in float64. Other tensors are copied from the best epoch. The averaged file contains only weights, so load it with
    `load_from`, not with `resume`.

    Args:
        metric: name of the validation metric that ranks the epochs.
        rule: `greater` if higher values are better, `less` if lower values are; by default what torchmetrics declares,
            or what the metric's name implies.
        count: maximum number of epochs to average.
        filename: file name of the averaged weights, in the work_dir.
    """

    priority = "HIGH"  # runs before most other hooks, including CheckpointHook

    def __init__(
        self,
        metric: str,
        rule: str | None = None,
        count: PositiveInt = 10,
        filename: str = "average_model.pth",
    ) -> None:
        check(count, PositiveInt, "count")
        check_name(filename, "filename", max_length=CHECKPOINT_NAME_LENGTH)
        self.metric, self.count, self.filename = metric, count, filename
        check(rule, Rule, "rule")
        self.rule = rule

    def before_train(self, runner: Runner) -> None:
        """Restore a resumed run's list of best epochs."""
        self.greater = require_rule(self, runner, self.metric) == "greater"
        self._folder = Path(runner.work_dir) / FOLDER
        best = [(value, name) for value, name in runner.message_hub.get_info(FOLDER, [])]
        missing = [[name for _, name in best if not (self._folder / name).is_file()]]
        broadcast_object_list(missing)  # only rank 0 may have access to the files
        for name in missing[0]:
            runner.logger.warning(
                f"AverageBestHook: {self._folder / name} does not exist; it is excluded from the average"
            )
        self._best = [(value, name) for value, name in best if name not in missing[0]]  # best first

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Save the weights if this epoch is among the best."""
        if not runner.is_training:
            return
        value = metric_value(self, metrics or {}, self.metric, "metric")
        count, unit = validation_count(runner, runner.by_epoch)
        entry = (value, f"{unit}_{count}.pth")
        # Sorting is stable, so the earlier epoch ranks first if values are identical.
        ranked = sorted(
            [*(other for other in self._best if other[1] != entry[1]), entry],
            key=lambda other: other[0],
            reverse=self.greater,
        )
        if not math.isfinite(value) or entry in ranked[self.count :]:
            return
        surplus = [name for _, name in ranked[self.count :]]

        def on_saved(_: Path) -> None:
            for name in surplus:
                remove_checkpoint(self._folder, name)

        with validation_weights(runner) as model:
            content = {"state_dict": model.state_dict()}
            write_checkpoint(
                content, self._folder / entry[1], runner.logger.warning, consolidate=True, on_saved=on_saved
            )
        self._best = ranked[: self.count]
        runner.message_hub.update_info(FOLDER, [list(other) for other in self._best])

    def after_train(self, runner: Runner) -> None:
        """Save and validate the average, and log its metrics under `average_model/`."""
        if not self._best:
            runner.logger.warning(
                "AverageBestHook: no average was computed, because there are no saved weights: no validation run "
                f"returned a finite '{self.metric}', or the files in {self._folder} were removed"
            )
            return
        names = [name for _, name in self._best]
        # Rank 0 broadcasts the average, because the other ranks may not have access to its file system.
        state: list[Any] = [_mean([self._folder / name for name in names]) if is_main_process() else None]
        broadcast_object_list(state)
        meta = {  # required to use the file outside the run
            "averaged": names,
            "experiment_name": runner.experiment_name,
            "cfg": config_text(runner.cfg),
            "dataset_meta": getattr(runner.train_dataloader.dataset, "metainfo", None),
        }
        content = {"meta": meta, "state_dict": state[0]}
        write_checkpoint(content, Path(runner.work_dir) / self.filename, runner.logger.warning)
        if runner.val_loop is None:
            return
        runner.logger.info(
            f"Validating {self.filename}, the average of {len(names)} checkpoint{'s' * (len(names) != 1)}: "
            f"{', '.join(names)}"
        )
        runner.call_hook("before_average_val")
        metrics = _validate_with(state[0], runner)
        runner.call_hook("after_average_val", metrics=metrics)
        scalars = {f"average_model/{k}": v for k, v in metrics.items() if isinstance(v, int | float)}
        runner.message_hub.update_scalars(scalars)
        step = runner.epoch if runner.by_epoch else runner.iter
        runner.visualizer.add_scalars(scalars, step=step, file_path=runner.json_log)


def _mean(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the mean weights of the checkpoints, which are read one at a time.

    Non-floating-point tensors are copied from the first checkpoint.
    """
    first = weights_in(load_checkpoint(paths[0]), paths[0])
    sums = {key: value.double() for key, value in first.items() if _is_float(value)}
    for path in paths[1:]:
        state = weights_in(load_checkpoint(path), path)
        for key, total in sums.items():
            total += state[key]
    return {key: (sums[key] / len(paths)).to(v.dtype) if key in sums else v for key, v in first.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _validate_with(state: Mapping[str, Any], runner: Runner) -> dict[str, Any]:
    """Validate with the weights in `state` and return the metrics; restore the weights and modes."""
    modes = [(module, module.training) for module in runner.model.modules()]
    with validation_weights(runner) as model:
        original = {k: v.clone() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()}
        model.load_state_dict({key: shard_like(value, original[key]) for key, value in state.items()})
        runner.is_training = False  # these metrics must not trigger checkpoints, schedulers or early stopping
        metrics: dict[str, Any] = runner.val_loop.run()
        runner.is_training = True
    for module, training in modes:
        module.training = training
    # EMAHook swaps the training weights back in after validation, so swap in the EMA weights again to restore them.
    with validation_weights(runner) as model:
        model.load_state_dict(original)
    return metrics
