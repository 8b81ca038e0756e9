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
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Return a function that runs `slipstream ARGS` in this process and the test's folder, and returns its output."""
    from slipstream.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # otherwise, `main` would set the variable permanently

    def run_command(*args: str, status: int | None = 0):
        found = main(list(args))
        output = capfd.readouterr()
        assert status in (None, found), f"exit {found}\n{output.out[-3000:]}\n{output.err[-3000:]}"
        return output

    return run_command


@pytest.fixture
def slipstream(run):
    """Return a function that runs `slipstream ARGS`."""
    return lambda *args, **kwargs: run("-m", "slipstream", *args, **kwargs)
