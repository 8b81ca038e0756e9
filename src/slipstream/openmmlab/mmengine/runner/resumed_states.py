"""Convert scheduler states from MMEngine checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.hooks import Hook

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["ConvertSchedulerStates"]


class ConvertSchedulerStates(Hook):
    """Remove the values of MMEngine's extra parameter group from resumed scheduler states.

    If the optimizer has several groups, MMEngine's optimizer wrapper adds a group without model parameters, in which it
    stores the base learning rate.
    """

    priority = "VERY_HIGH"

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Convert the states in place."""
        if runner.param_schedulers and runner.checkpoints.resuming:
            _convert(runner.param_schedulers, checkpoint.get("param_schedulers"))


def _convert(schedulers: Any, states: Any) -> None:
    if isinstance(schedulers, dict) and isinstance(states, Mapping):
        for name, part in schedulers.items():
            _convert(part, states.get(name))
    elif isinstance(schedulers, list) and isinstance(states, list):
        for scheduler, state in zip(schedulers, states, strict=False):
            count = len(getattr(scheduler, "base_values", ()))
            for key in ("base_values", "_last_value"):
                values = state.get(key) if isinstance(state, dict) else None
                if isinstance(values, list) and len(values) == count + 1:
                    state[key] = values[:count]
