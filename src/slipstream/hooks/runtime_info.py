"""Record the run state in the message hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.hooks.hook import Hook
from slipstream.optim import OptimWrapper
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["RuntimeInfoHook"]


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Record the seed, experiment name, epoch, iteration and metrics in the message hub.

    Losses and learning rates are not read at every step. `Runner.read_logs` records them at log intervals. If named
    parameter groups have different learning rates, this hook also records each rate as `train/lr/NAME`.
    """

    priority = "VERY_HIGH"

    def before_run(self, runner: Runner) -> None:
        """Record the configuration, the seed and the experiment name."""
        infos = {"cfg": runner.cfg_text, "seed": runner.seed, "experiment_name": runner.experiment_name}
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
        """Record the epoch and the iteration."""
        runner.message_hub.update_info_dict({"epoch": runner.epoch, "iter": runner.iter})

    def read_logs(self, runner: Runner) -> None:
        """Record the learning rates of named parameter groups."""
        wrapper = runner.optim_wrapper
        if not isinstance(wrapper, OptimWrapper):
            return
        groups = [group for group in wrapper.param_groups if "name" in group]
        if len({float(group.get("initial_lr", group["lr"])) for group in groups}) > 1:
            rates = {f"train/lr/{group['name']}": float(group["lr"]) for group in groups}
            runner.message_hub.update_scalars(rates)

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
                runner.message_hub.update_scalar(f"{mode}/{name}", value)
            else:
                runner.message_hub.update_info(f"{mode}/{name}", value)
