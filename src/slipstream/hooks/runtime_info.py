"""Record the run state in the message hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.config import config_text
from slipstream.hooks.hook import Hook
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Record the seed, experiment name, epoch, iteration and metrics in the message hub.

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
        """Record the epoch."""
        runner.message_hub.update_info("epoch", runner.epoch)

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
