"""The latest values of a run, for the progress bar and the notebook table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.hooks.checkpoint import CheckpointHook
from slipstream.scalars import is_learning_rate, number

if TYPE_CHECKING:
    from slipstream.runner import Runner

# Number of losses to average; matches the default for log lines.
_LOSS_WINDOW = 10


class LiveValues:
    """The values to display, as strings.

    These are the mean of the last 10 losses, and the latest learning rate, metric, training speed and fraction of time
    spent waiting for data.

    Reading the values does not cause a device synchronization. The values are updated when the Runner reads the losses,
    and after each validation run.
    """

    def __init__(self) -> None:
        self._metric: tuple[str, str] | None = None

    def add_metrics(self, runner: Runner, metrics: dict[str, float] | None) -> None:
        """Store one validation metric: the one in `CheckpointHook.save_best` if set, otherwise the first."""
        values = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        monitored = (
            name for hook in runner.hooks if isinstance(hook, CheckpointHook) for name in hook.monitors
        )
        name = next((name for name in monitored if name in values), next(iter(values), None))
        if name is not None:
            self._metric = name, number(values[name])

    def rows(self, runner: Runner) -> list[tuple[str, str]]:
        """Return (name, value) pairs for the values that are available."""
        hub = runner.message_hub
        rows = []
        if "train/loss" in hub.log_scalars:
            rows.append(("loss", number(hub.get_scalar("train/loss").mean(_LOSS_WINDOW))))
        if (rate := next((key for key in hub.log_scalars if is_learning_rate(key)), None)) is not None:
            rows.append(("lr", number(float(hub.get_scalar(rate).current()), 3)))
        if self._metric is not None:
            rows.append(self._metric)
        if (speed := hub.get_info("recent_speed")) is not None:
            rows.append(("images/s", number(speed["images_per_second"], 3)))
            rows.append(("waiting for data", f"{speed['waiting_for_data']:.0%}"))
        return rows
