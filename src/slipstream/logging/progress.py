"""A progress bar below the log lines."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_SECONDS_BETWEEN_DRAWS = 0.1


class ProgressBar:
    """A bar with a counter, the remaining time and a short text. The bar is displayed only on a terminal.

    Args:
        console: the logger's console (`MMLogger.console`), which lets log lines scroll above the bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._task: TaskID
        self._next_draw = 0.0

    def start(self, total: int | None, description: str = "") -> None:
        """Replace the previous bar, if any, with an empty bar for `total` steps (None if unknown)."""
        self.stop()
        if self.console.is_terminal:
            self._progress = _progress(self.console)
            self._task = self._progress.add_task(description, total=total, text="")
            self._progress.start()
            self._next_draw = 0.0

    def update(self, step: int, text: str = "") -> None:
        """Show the number of finished steps and the text; redraw at most ten times per second."""
        if self._progress is None or (now := perf_counter()) < self._next_draw:
            return
        self._next_draw = now + _SECONDS_BETWEEN_DRAWS
        self._progress.update(self._task, completed=step, text=text, refresh=True)

    def stop(self) -> None:
        """Remove the bar; the log lines remain."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        # On a narrow terminal, the text continues on the next line.
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=False)),
        console=console,
        # update() draws the bar and limits the rate, so no refresh thread is required.
        auto_refresh=False,
        transient=True,
    )
