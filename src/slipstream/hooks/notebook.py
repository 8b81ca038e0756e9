"""Show a table and curves of a run in a Jupyter notebook."""

from __future__ import annotations

import base64
import sys
from html import escape
from time import perf_counter
from typing import TYPE_CHECKING, Any

from slipstream.hooks.hook import Hook
from slipstream.hooks.live_values import LiveValues
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.report import Curve
    from slipstream.runner import Runner

_SECONDS_BETWEEN_DRAWS = 0.5
_MAX_CHARTS = 4


def in_notebook() -> bool:
    """Return whether this process is a Jupyter notebook kernel. This function does not import any modules."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


@HOOKS.register_module()
class NotebookHook(Hook):
    """Show the latest values of a run and its loss and metric curves below a notebook cell.

    The Runner registers this hook on rank 0 in a notebook. The output is updated when the Runner reads the
    losses, at most twice per second, and after each validation run.
    """

    priority = "LOWEST"

    def __init__(self) -> None:
        self._values = LiveValues()
        self._curves: dict[str, Curve] = {}
        self._num_read = 0
        self._next_draw = 0.0
        self._display: Any = None

    def before_train(self, runner: Runner) -> None:
        """Show an empty table."""
        self._values, self._curves, self._display = LiveValues(), {}, None
        self._num_read = self._num_losses(runner)
        self._draw(runner)

    def read_logs(self, runner: Runner) -> None:
        """Add the losses recorded since the last call, and update the table."""
        if self._display is None:
            return
        new, self._num_read = self._num_losses(runner) - self._num_read, self._num_losses(runner)
        if new > 0:
            losses = runner.message_hub.get_scalar("train/loss").newest(new)
            self._curve("train/loss").add(
                runner.meter.newest or runner.iter, reversed(losses)
            )  # in step order
        if perf_counter() >= self._next_draw:
            self._draw(runner)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics, and update the table."""
        if self._display is None:
            return
        self._values.add_metrics(runner, metrics)
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                self._curve(f"val/{name}").add(runner.iter, [value])
        self._draw(runner)

    def after_train(self, runner: Runner) -> None:
        """Show the final values."""
        if self._display is not None:
            self._draw(runner)
            self._display = None

    def _curve(self, name: str) -> Curve:
        from slipstream.report import Curve  # imported here, because only notebooks need it

        return self._curves.setdefault(name, Curve())

    def _num_losses(self, runner: Runner) -> int:
        history = runner.message_hub.log_scalars.get("train/loss")
        return 0 if history is None else history.total

    def _draw(self, runner: Runner) -> None:
        from IPython.display import display

        from slipstream.report.chart import line_chart

        self._next_draw = perf_counter() + _SECONDS_BETWEEN_DRAWS
        total = f" of {runner.max_iters:,}" if runner.knows_length else ""
        rows = [("iteration", f"{runner.iter:,}{total}"), *self._values.rows(runner)]
        head, cells = (
            "".join(f"<{tag}>{escape(row[i])}</{tag}>" for row in rows) for i, tag in ((0, "th"), (1, "td"))
        )
        html = f"<table><tr>{head}</tr><tr>{cells}</tr></table>"
        for name, curve in list(self._curves.items())[:_MAX_CHARTS]:
            if svg := base64.b64encode(line_chart(name, curve).encode()).decode():
                html += f'<img alt="{escape(name)}" width="420" src="data:image/svg+xml;base64,{svg}">'
        content = {"text/html": html, "text/plain": "  ".join(f"{name} {value}" for name, value in rows)}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)
