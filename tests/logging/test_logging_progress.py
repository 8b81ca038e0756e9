import io
import time

import pytest
from rich.console import Console

from slipstream.logging import ProgressBar, build_logger


@pytest.fixture
def terminal():
    return Console(force_terminal=True, file=io.StringIO(), width=100, color_system=None)


def test_bar_shows_description_count_and_text(terminal):
    bar = ProgressBar(terminal)
    bar.start(500, "Epoch [1]")
    bar.update(100, "loss [0.5]")
    shown = terminal.file.getvalue()
    bar.stop()
    assert "Epoch [1]" in shown
    assert "100/500" in shown
    assert "loss [0.5]" in shown


def test_bar_redraws_at_most_ten_times_a_second(terminal):
    bar = ProgressBar(terminal)
    bar.start(10**9, "x")
    end = time.perf_counter() + 0.35
    step = 0
    while time.perf_counter() < end:
        step += 1
        bar.update(step)
    draws = terminal.file.getvalue().count("/1000000000")
    bar.stop()
    assert step > 1000
    assert draws <= 6


def test_log_lines_are_printed_above_the_bar(terminal):
    logger = build_logger("a")
    logger.console = logger.handlers[0].console = terminal
    bar = ProgressBar(logger.console)
    bar.start(10, "working")
    bar.update(1)
    logger.info("a line")
    shown = terminal.file.getvalue()
    bar.stop()
    assert shown.index("a line") < shown.rindex("working")


def test_bar_is_not_drawn_without_a_terminal():
    console = Console(file=io.StringIO())
    bar = ProgressBar(console)
    bar.start(10, "x")
    bar.update(5, "text")
    bar.stop()
    assert console.file.getvalue() == ""
