"""Run a Python command in a separate process, which is terminated on a timeout or an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import IO

from slipstream.process_tree import descendants, kill_group

__all__ = ["Child", "interrupt_on_sigterm", "run_child"]

_GRACE = 20.0
"""Seconds to wait after SIGINT, and again after SIGTERM, before a process is killed.

Training saves its state during this time.
"""


@dataclass(frozen=True)
class Child:
    """A process that has exited."""

    status: int
    """Exit status, or 128 + the number of the signal that terminated the process."""
    reason: str
    """The reason for the failure, on one line; empty on success."""
    seconds: float


def run_child(
    argv: Sequence[str],
    *,
    timeout: float | None = None,
    quiet: bool = False,
    grace: float = _GRACE,
    environ: Mapping[str, str] | None = None,
) -> Child:
    """Run `python ARGV` and wait for it to exit. Its standard error is copied to this process's standard error.

    When this function returns or raises, the process and its process group have exited. If the process must be
    terminated, the processes that it started in other sessions are also terminated (Linux only).

    Args:
        argv: arguments for the Python interpreter, such as `["-m", "slipstream", "train", ...]`.
        timeout: seconds after which the process is terminated; None means no limit.
        quiet: whether to discard the process's output. The reason for a failure is still returned.
        grace: seconds to wait for the process to exit after SIGINT, and again after SIGTERM.
        environ: environment variables to set in addition to those of this process.
    """
    start, last_lines = perf_counter(), deque[str](maxlen=50)
    process = subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environ or {})},
        text=True,
        errors="replace",
        start_new_session=True,  # so that Ctrl-C reaches the new process only through this process
    )
    assert process.stderr is not None
    reader = threading.Thread(target=_copy, args=(process.stderr, last_lines, quiet), daemon=True)
    reader.start()
    timeout_reason = ""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        timeout_reason = f"did not finish within {timeout:g} s"
    finally:
        _end(process, grace)
        reader.join(timeout=5)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Child(
        status or int(bool(timeout_reason)),
        timeout_reason or _reason(process.returncode, last_lines),
        perf_counter() - start,
    )


def _copy(stream: IO[str], last_lines: deque[str], quiet: bool) -> None:
    for line in stream:
        last_lines.append(line.rstrip())
        if not quiet:
            sys.stderr.write(line)


def _end(process: subprocess.Popen[str], grace: float) -> None:
    """Terminate the process, then kill the remaining processes that it started or that belong to its group."""
    children = descendants(process.pid) if process.poll() is None else {}
    try:
        if process.poll() is None:
            # A process started in the background by a script, and its children, ignore SIGINT.
            ignores_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            process.send_signal(signal.SIGTERM if ignores_sigint else signal.SIGINT)
            process.wait(grace)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # on SIGTERM, a launcher terminates its processes
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    finally:
        if process.poll() is None:
            children |= descendants(process.pid)
        kill_group(process.pid, children)
        process.wait()


def _reason(returncode: int, lines: Sequence[str]) -> str:
    """Return a process's error on one line, given the last lines of its standard error."""
    if returncode == 0:
        return ""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return f"killed by {name}" + (
            ", possibly because the machine ran out of memory" if name == "SIGKILL" else ""
        )
    errors = [line for line in lines if "error: " in line and line.startswith("slipstream")]
    text = errors[-1].partition("error: ")[2] if errors else next(filter(None, reversed(lines)), "")
    return text or f"exited with status {returncode}"


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt in the `with` block on SIGTERM, as on Ctrl-C.

    Processes started in the block are then terminated, and partial results are kept.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
