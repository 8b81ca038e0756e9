"""Record the run state in the message hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.config import config_text
from slipstream.dist import all_gather_object, is_main_process
from slipstream.hooks.hook import Hook
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.registry import HOOKS
from slipstream.typecheck import matches

if TYPE_CHECKING:
    from slipstream.runner import Runner


# The key of the sums of the losses in a checkpoint.
_SUMS = "epoch_sums"


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Record the seed, experiment name, epoch, iteration, metrics and mean losses of epochs in the message hub.

    After each epoch of epoch-based training, the scalar `train_epoch/loss` is the mean of `loss` over all samples of
    the epoch, on all ranks, and so on for the other losses.

    Losses and learning rates are not read at every step. `Runner.read_logs` records them at log intervals. If the
    parameter groups of an optimizer have different learning rates, this hook also records each rate as `train/lr/NAME`,
    or as `train/lr/0`, `train/lr/1` and so on for unnamed groups. With several optimizers, the scalars are
    named `train/OPTIMIZER.lr/NAME`. If several unnamed groups have equal rates, only the first one is recorded.
    """

    priority = "VERY_HIGH"

    def before_run(self, runner: Runner) -> None:
        """Record the configuration, the seed and the experiment name."""
        infos = {
            "cfg": config_text(runner.cfg),
            "seed": runner.seed,
            "experiment_name": runner.experiment_name,
        }
        runner.message_hub.update_info_dict(infos, resumed=False)

    def before_train(self, runner: Runner) -> None:
        """Record the progress and length of training."""
        runner.message_hub.update_info_dict(
            {
                "loop_stage": "train",
                "epoch": runner.epoch,
                "iter": runner.iter,
                "max_epochs": runner.max_epochs,
                "max_iters": runner.max_iters,
            }
        )

    def before_train_epoch(self, runner: Runner) -> None:
        """Record the epoch, and start the sums of its losses, or continue those of a resumed run."""
        runner.message_hub.update_info("epoch", runner.epoch)
        saved = runner.message_hub.pop_info(_SUMS)
        if not runner.inner_iter:
            runner.meter.sums = {}
        elif saved is not None:  # the checkpoint contains the sums of all ranks
            valid = matches(saved, dict[str, list[float]]) and all(
                len(total) == 2 for total in saved.values()
            )
            runner.meter.sums = saved if valid and is_main_process() else {}

    def after_train_epoch(self, runner: Runner) -> None:
        """Record the mean of each loss over the epoch."""
        if runner.by_epoch:
            runner.read_logs()
            means = {name: total / count for name, (total, count) in _sums_of_ranks(runner).items() if count}
            runner.message_hub.update_info("epoch_means", means, resumed=False)
            for name, mean in means.items():
                runner.message_hub.update_metric(f"train_epoch/{name}", mean)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Save the sums of the losses over the current epoch."""
        if runner.is_training and runner.by_epoch:
            checkpoint["message_hub"]["runtime_info"][_SUMS] = _sums_of_ranks(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Record the iteration, which the `train_step` of many GANs reads to alternate between networks."""
        runner.message_hub.update_info("iter", runner.iter)

    def read_logs(self, runner: Runner) -> None:
        """Record the learning rates of parameter groups that have different rates."""
        wrapper = runner.optim_wrapper
        if isinstance(wrapper, OptimWrapperDict):
            for name, part in wrapper.items():
                runner.message_hub.update_scalars(_group_rates(part, f"train/{name}.lr"))
        elif isinstance(wrapper, OptimWrapper):
            runner.message_hub.update_scalars(_group_rates(wrapper, "train/lr"))

    def before_val(self, runner: Runner) -> None:
        """Record the stage."""
        runner.message_hub.update_info("loop_stage", "val")

    def after_val(self, runner: Runner) -> None:
        """Record the stage."""
        runner.message_hub.update_info("loop_stage", "train")

    def before_test(self, runner: Runner) -> None:
        """Record the stage."""
        runner.message_hub.update_info("loop_stage", "test")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self._record(runner, "val", metrics)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        self._record(runner, "test", metrics)

    @staticmethod
    def _record(runner: Runner, mode: str, metrics: dict[str, Any] | None) -> None:
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                runner.message_hub.update_metric(f"{mode}/{name}", value)
            else:
                runner.message_hub.update_info(f"{mode}/{name}", value)


def _sums_of_ranks(runner: Runner) -> dict[str, list[float]]:
    """Return `runner.meter.sums`, summed over all ranks."""
    sums: dict[str, list[float]] = {}
    for part in all_gather_object(runner.meter.sums):
        for name, values in part.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0)), values, strict=True)]
    return sums


def _group_rates(wrapper: OptimWrapper, prefix: str) -> dict[str, float]:
    """Return the learning rate of each group as `PREFIX/NAME`, or an empty dict if all groups have the same rates."""
    rates: dict[str, float] = {}
    seen = set()
    for index, group in enumerate(wrapper.param_groups):
        rate = float(group["lr"])
        pair = (float(group.get("initial_lr", rate)), rate)
        # A configuration can create one unnamed group for each parameter.
        if "name" in group or pair not in seen:
            rates[f"{prefix}/{group.get('name', index)}"] = rate
        seen.add(pair)
    return rates if len(seen) > 1 else {}
