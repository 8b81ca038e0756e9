"""Checks that a training run succeeded, or failed as expected."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.machines import Run

FAILING = Path(__file__).with_name("failing_training.py")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def trained(folder: Path, processes: int, steps: int) -> None:
    """Check the number of processes and steps in the only log under work_dirs."""
    logs = list(folder.glob("work_dirs/*/*/*.log"))
    assert len(logs) == 1, logs
    text = logs[0].read_text()
    assert f"world_size {processes}" in text, text
    assert f"Trained for {steps} steps" in text, text


def words(run: Run) -> str:
    """Return a run's output without colors, cursor movements or line breaks."""
    return " ".join(_ANSI.sub(" ", run.output).split())


def ended_by_rank_1(run: Run, how: str, within: float = 60) -> None:
    """Check that the failure of rank 1 ended training on all ranks, and that the traceback of rank 1 came first.

    The time limit includes the startup, which is slow on a busy machine. Without failure detection, the other ranks
    would wait for ten minutes.
    """
    said = words(run.failed())
    assert run.seconds < within, said
    assert "trained to the end" not in said
    if how == "raise":
        first = re.search(r"\b(\w+(?:Error|Exception)): ", said)
        assert first, said
        assert first[1] == "ValueError", said
        assert "ValueError: the third step is too high" in said
        assert "on rank 1 of 2, in epoch 1, iteration 3" in said
    else:
        assert re.search(r"rank 1 exited without reporting an error|Killed|SIGKILL", said), said
