"""A timer."""

from __future__ import annotations

import time
from typing import Any

from slipstream.errors import SlipstreamError

__all__ = ["Timer", "TimerError"]


class TimerError(SlipstreamError):
    """Raised if a timer is read while it is not running."""


class Timer:
    """Measure the time since the start and since the last check; can be used in a `with` statement.

    Args:
        start: whether to start the timer.
        print_tmpl: format string, such as `{:.3f}`, for the time that is printed at the end of a `with` block.
    """

    def __init__(self, start: bool = True, print_tmpl: str | None = None) -> None:
        self.print_tmpl = print_tmpl or "{:.3f}"
        self._start = self._last = 0.0
        self._is_running = False
        if start:
            self.start()

    @property
    def is_running(self) -> bool:
        """Whether the timer is running."""
        return self._is_running

    def start(self) -> None:
        """Start the timer if it is not running, and reset the time of the last check."""
        if not self._is_running:
            self._start, self._is_running = time.monotonic(), True
        self._last = time.monotonic()

    def since_start(self) -> float:
        """Return the seconds since the start."""
        self._check()
        self._last = time.monotonic()
        return self._last - self._start

    def since_last_check(self) -> float:
        """Return the seconds since the last call to this method, `since_start` or `start`."""
        self._check()
        previous, self._last = self._last, time.monotonic()
        return self._last - previous

    def _check(self) -> None:
        if not self._is_running:
            raise TimerError("the timer is not running; call start() first")

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *args: Any) -> None:
        print(self.print_tmpl.format(self.since_last_check()))
        self._is_running = False
