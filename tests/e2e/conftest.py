"""Fixtures that run commands in an empty folder."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forked_python import ForkedPython

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root() -> Path:
    """Return the root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def python() -> Iterator[ForkedPython]:
    """Yield a server that runs Python commands."""
    server = ForkedPython()
    yield server
    server.close()


@pytest.fixture
def run(tmp_path: Path, python: ForkedPython) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `python ARGS` in the test's folder, checks the exit status and returns the result.

    With `forked=False`, a new interpreter runs the command, for tests that check which modules are imported.
    """

    def run_python(
        *args: str, status: int | None = 0, cwd: Path = tmp_path, forked: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = python.run(*args, cwd=cwd, timeout=300, forked=forked)
        assert status in (None, done.returncode), (
            f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done

    return run_python


@pytest.fixture
def slipstream(run):
    """Return a function that runs `slipstream ARGS`."""
    return lambda *args, **kwargs: run("-m", "slipstream", *args, **kwargs)
