"""Fixtures that run commands in an empty folder."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root() -> Path:
    """Return the project's folder."""
    return ROOT


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python ARGS` in the test's folder, check the exit status and return the output."""

    def run_python(
        *args: str, status: int | None = 0, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *args],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert status in (None, done.returncode), (
            f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done

    return run_python


@pytest.fixture
def slipstream(run):
    """Run `slipstream ARGS`."""
    return lambda *args, **kwargs: run("-m", "slipstream", *args, **kwargs)
