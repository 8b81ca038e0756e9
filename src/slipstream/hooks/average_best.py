"""One model out of the best ones of a training: the mean of their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.checkpoint import load_checkpoint, remove_checkpoint, write_checkpoint
from slipstream.dist import broadcast_object_list, is_main_process
from slipstream.dist.sharding import shard_like
from slipstream.errors import ConfigError
from slipstream.hooks.ema import as_validated
from slipstream.hooks.hook import Hook
from slipstream.hooks.schedule import better, pick
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["AverageBestHook"]

FOLDER = "average_best"


@HOOKS.register_module()
class AverageBestHook(Hook):
    """Write the mean of the weights of the best validated epochs, and validate it, when the training ends.

    The weights are those that were validated: of a run with an `EMAHook`, the average's. Each is written once, to
    the folder `average_best` of the work_dir, and removed when better ones have come; what is there at the end
    stays, so that a longer training can go on from it. The stages `before_average_val` and `after_average_val` (with
    `metrics`) are around the validation at the end. Floating-point tensors are averaged in float64; of all
    others, the best epoch's are taken. The file holds weights alone: `load_from` takes it, `resume` does not.

    Args:
        metric: what makes an epoch good, a name that the validation gives.
        rule: whether `greater` or `less` is better; by default the metric's name decides.
        count: how many are averaged, or fewer if there are not so many.
        filename: of the mean, in the work_dir.
    """

    priority = "HIGH"  # the best checkpoint, and whatever comes when a training ends, shall know of it

    def __init__(
        self,
        metric: str,
        rule: str | None = None,
        count: int = 10,
        filename: str = "average_model.pth",
    ) -> None:
        if count < 1:
            raise ConfigError(f"must be at least 1, not {count}", "count")
        self.metric, self.count, self.filename = metric, count, filename
        self.greater = better(metric, rule) == "greater"

    def before_train(self, runner: Runner) -> None:
        """Go on with the epochs that a resumed run had kept."""
        self._folder = Path(runner.work_dir) / FOLDER
        kept = runner.message_hub.get_info(FOLDER, [])
        there = [[(self._folder / name).is_file() for _, name in kept] if is_main_process() else None]
        broadcast_object_list(there)
        self._best: list[tuple[float, str]] = []  # the best first
        for (value, name), found in zip(kept, there[0] or (), strict=True):
            if found:
                self._best.append((value, name))
            else:
                runner.logger.warning(f"AverageBestHook: {self._folder / name} is gone: it is not averaged")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Keep the weights if they are among the best."""
        if not runner.is_training:
            return
        value = pick(self, metrics or {}, self.metric, "metric")
        number, by = (runner.epoch, "epoch") if runner.by_epoch else (runner.iter, "iter")
        entry = (value, f"{by}_{number}.pth")
        # Sorting keeps the order of equals: the later does not drive out the earlier.
        ranked = sorted(
            [*(kept for kept in self._best if kept[1] != entry[1]), entry],
            key=lambda kept: kept[0],
            reverse=self.greater,
        )
        if not math.isfinite(value) or entry in ranked[self.count :]:
            return
        with as_validated(runner) as model:
            content = {"state_dict": model.state_dict()}
            write_checkpoint(content, self._folder / entry[1], runner.logger.warning, consolidate=True)
        self._best = ranked[: self.count]
        runner.message_hub.update_info(FOLDER, [list(kept) for kept in self._best])
        for _, name in ranked[self.count :] if is_main_process() else ():
            remove_checkpoint(self._folder, name)

    def after_train(self, runner: Runner) -> None:
        """Write the mean, validate it, and log its metrics as those of `average_model`."""
        if not self._best:
            runner.logger.warning(f"AverageBestHook: no validation gave '{self.metric}': nothing is averaged")
            return
        names = [name for _, name in self._best]
        # From rank 0 to all: the others may not see its disk.
        state: list[Any] = [_mean([self._folder / name for name in names]) if is_main_process() else None]
        broadcast_object_list(state)
        content = {"meta": {"averaged": names, **_meta(runner)}, "state_dict": state[0]}
        write_checkpoint(content, Path(runner.work_dir) / self.filename, runner.logger.warning)
        if runner.val_loop is None:
            return
        runner.logger.info(f"Validating {self.filename}, the mean of {len(names)}: {', '.join(names)}")
        runner.call_hook("before_average_val")
        metrics = _validate_with(state[0], runner)
        runner.call_hook("after_average_val", metrics=metrics)
        scalars = {f"average_model/{k}": v for k, v in metrics.items() if isinstance(v, int | float)}
        runner.message_hub.update_scalars(scalars)
        step = runner.epoch if runner.by_epoch else runner.iter
        runner.visualizer.add_scalars(scalars, step=step, file_path=runner.json_log)


def _mean(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the mean of checkpoints' weights, read one after the other; what is no floating point is the first's."""
    first: dict[str, Any] = load_checkpoint(paths[0])["state_dict"]
    sums = {key: value.double() for key, value in first.items() if _is_float(value)}
    for path in paths[1:]:
        state = load_checkpoint(path)["state_dict"]
        for key, total in sums.items():
            total += state[key]
    return {key: (sums[key] / len(paths)).to(v.dtype) if key in sums else v for key, v in first.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _meta(runner: Runner) -> dict[str, Any]:
    """Return what makes the file usable without the run."""
    dataset = getattr(runner.train_dataloader, "dataset", None)
    return {
        "experiment_name": runner.experiment_name,
        "cfg": runner.cfg_text,
        "dataset_meta": getattr(dataset, "metainfo", None),
    }


def _validate_with(state: Mapping[str, Any], runner: Runner) -> dict[str, Any]:
    """Return the metrics of other weights, and leave those of the training as they were."""
    with as_validated(runner) as model:
        own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()}
        model.load_state_dict({key: shard_like(value, own[key]) for key, value in state.items()})
        runner.is_training = False  # nothing shall be saved, scheduled or stopped for these metrics
        metrics: dict[str, Any] = runner.val_loop.run()
        runner.is_training = True
    runner.model.train()
    # The end of the validation has put the weights back; what it validated in is to be mended too.
    with as_validated(runner) as model:
        model.load_state_dict(own)
    return metrics
