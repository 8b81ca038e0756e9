"""One trial in a separate process, which can fail, hang or be killed without affecting this process."""

from __future__ import annotations

import contextvars
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.devices import is_out_of_memory
from slipstream.dist import is_distributed
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.process_tree import descendants, kill, kill_group
from slipstream.tune.observer import Finished, Observer, Timer

__all__ = [
    "WARMUP",
    "Job",
    "Process",
    "TrialError",
    "budget_error",
    "forks",
    "format_seconds",
    "incomplete_note",
]

WARMUP = 6
"""Number of initial steps whose losses are compared. Timing starts after these steps."""
_LOG = "output.log"
_RESET_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
)
"""Signals whose handlers are reset, because handlers inherited from the parent process would keep a trial alive."""


class Job(Protocol):
    """A training run that a trial can execute. It must be picklable unless `forks()` returns True."""

    def train(self, observer: Observer, folder: Path) -> None:
        """Train until `observer` raises `Finished`; write files only in `folder`, which is deleted afterwards."""


class TrialError(Exception):
    """A trial ended without a result.

    Args:
        status: `out of memory`, `timed out`, `failed` or `not measured`.
        reason: a one-line description.
        warmup_seconds: durations of the completed steps, in seconds.
    """

    def __init__(self, status: str, reason: str, warmup_seconds: tuple[float, ...] = ()) -> None:
        super().__init__(status, reason, warmup_seconds)  # pickle passes these arguments to the constructor
        self.status = status
        self.reason = reason
        self.warmup_seconds = warmup_seconds

    def __str__(self) -> str:
        return self.reason


def incomplete_note(name: str, stopped: str) -> str:
    """Return a sentence that states why a search or measurement is not complete.

    Args:
        name: `search` or `measurement`.
        stopped: `interrupted`, or the reason as a clause, such as `the time budget ran out`.
    """
    return f"The {name} is not complete, because {'it was interrupted' if stopped == 'interrupted' else stopped}."


def budget_error(
    budget: float, name: str, finished: int, steps: int, seconds: float | None = None
) -> ConfigError:
    """Return the error for a trial that finished only `finished` of `steps` steps within `budget` seconds.

    `seconds` is the expected duration of the trial; if None, it is estimated from the number of steps.
    """
    if finished:
        needed = f"about {format_seconds(budget * steps / finished if seconds is None else seconds)}"
    else:
        needed = f"at least {format_seconds(4 * budget)}"
    return ConfigError(
        f"{format_seconds(budget)} is too short: {name} finished {finished} of {steps} steps within this time; it "
        f"needs {needed}",
        "budget",
    )


def format_seconds(seconds: float) -> str:
    """Return a duration with two significant digits, or in whole seconds if it is 10 s or longer."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


class Process:
    """A process that runs a job. At the end of a `with` block, the process and all its descendants are killed.

    Args:
        job: the run to execute.
        make_observer: a function that accepts the connection and returns an observer. By default, it returns a `Timer`.
    """

    def __init__(self, job: Job, make_observer: Any = None) -> None:
        make_observer = make_observer or partial(Timer, warmup=WARMUP)
        fork = forks()
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        # A forked process has copies of all objects. Otherwise, plain pickle copies tensors, whereas the pickler of
        # torch.multiprocessing would share their memory, and the trial would train the user's model.
        work = (job, make_observer) if fork else _pickle(job, make_observer)
        self._connection, child_connection = context.Pipe()
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-tune-"))
        self.warmup_seconds: list[float] = []
        """Durations of the steps reported so far, in seconds."""
        self._process = context.Process(
            target=_main, args=(child_connection, work, self._folder, torch.get_num_threads(), fork)
        )
        try:
            with _defer_signals():
                self._process.start()
        except BaseException:
            self.end()
            raise
        child_connection.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int | None:
        """The process id."""
        pid: int | None = self._process.pid
        return pid

    def wait_for(self, event: str, seconds: float) -> dict[str, Any]:
        """Wait for the next message of type `event` and return it.

        Args:
            event: `warm`, `timed` or `sweep`.
            seconds: the timeout in seconds.

        Raises:
            TrialError: the run failed, ended, or did not respond within `seconds`.
        """
        message = self.poll(event, seconds)
        if message is None:
            raise self.timeout(event, seconds)
        return message

    def poll(self, event: str, seconds: float) -> dict[str, Any] | None:
        """Return the next message of type `event`, or None if it does not arrive within `seconds`.

        Raises:
            TrialError: the run failed or ended.
        """
        end = time.monotonic() + seconds
        while self._connection.poll(max(end - time.monotonic(), 0)):
            try:
                message: dict[str, Any] = self._connection.recv()
            except (EOFError, OSError):
                raise self._exit_error() from None
            if message["event"] == "step":
                self.warmup_seconds.append(message["seconds"])
            elif message["event"] == "failed":
                raise TrialError(message["status"], message["reason"], tuple(self.warmup_seconds))
            elif message["event"] == event:
                return message
        return None

    def timeout(self, event: str, seconds: float) -> TrialError:
        """Return the error for a message of type `event` that did not arrive within `seconds`."""
        finished = f"only {_steps(len(self.warmup_seconds))} finished"
        progress = "no measurement" if event == "timed" else finished
        return TrialError("timed out", f"{progress} in {seconds:.0f} s", tuple(self.warmup_seconds))

    def time(self, steps: int, untimed: int, seconds: float) -> dict[str, Any]:
        """Run `untimed` untimed steps and then `steps` timed steps.

        Returns:
            A dict with `seconds` (the mean step time), `peak_mib` and `loss`.

        Raises:
            TrialError: see `wait_for`.
        """
        self.request(steps, untimed)
        return self.wait_for("timed", seconds)

    def request(self, steps: int, untimed: int) -> None:
        """Start `untimed` untimed and then `steps` timed steps; the next `timed` message contains the mean step time.

        Raises:
            TrialError: the run ended.
        """
        try:
            self._connection.send((steps, untimed))
        except OSError:
            raise self._exit_error() from None

    def end(self) -> None:
        """Kill the process and all its descendants. Further calls have no effect."""
        if self._connection.closed:
            return  # the process id may already belong to another process
        if self.pid is not None:
            kill_group(self.pid, descendants(self.pid))
            self._process.kill()  # until the process starts a session, it belongs to its parent's process group
            self._process.join()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _exit_error(self) -> TrialError:
        self._process.join(10)
        code = self._process.exitcode
        last = _last_line(self._folder / _LOG)
        if code == -signal.SIGKILL:
            return TrialError(
                "out of memory", "killed by SIGKILL, most likely because the system ran out of memory"
            )
        name = (
            f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
        )
        return TrialError("failed", f"{name}{': ' + last if last else ''}", tuple(self.warmup_seconds))


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block, because Python ignores exceptions raised in an at-fork callback."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda signum, frame: received.append(signum))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for signum in received:
        signal.raise_signal(signum)


def forks() -> bool:
    """Return whether trial processes are forked.

    A forked process cannot use an accelerator or the process group of its parent process.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available() and not is_distributed()


def _pickle(job: Job, make_observer: Any) -> bytes:
    try:
        return pickle.dumps((job, make_observer))
    except Exception as error:  # pickle raises many types of errors
        reason = "with a process group" if is_distributed() else "on this machine"
        raise ConfigError(
            "the model, the loader, the optimizer and the loss cannot be copied to another process "
            f"({error}); {reason}, define them at the top level of a module, not in a function or as a lambda"
        ) from error


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""
    return ""


# ---- in the trial's process ----------------------------------------------------------------------------------------


def _main(connection: Connection, work: Any, folder: Path, threads: int, forked: bool) -> None:
    """Run the job of a trial. This function does not return."""
    try:
        _isolate(folder / _LOG)
        if forked:
            gc.freeze()  # prevents finalizers of the parent's objects from running
            # The parent's OpenMP threads do not exist in this process, but a new thread starts its own. The thread gets
            # a copy of the context, because torch's settings are context variables.
            context, arguments = contextvars.copy_context(), (_run, connection, folder, work, threads)
            thread = threading.Thread(target=context.run, args=arguments, daemon=True)
            thread.start()
            thread.join()
        else:
            _run(connection, folder, work, threads)
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        kill(descendants(os.getpid()))
        os._exit(0)


def _isolate(log: Path) -> None:
    """Start a new session, redirect all output to `log`, and (on Linux) exit when the parent process exits."""
    os.setsid()
    faulthandler.disable()  # it would write to the parent's stderr
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        parent = parent_process()
        if parent is not None and not parent.is_alive():  # it exited before the call above
            os._exit(0)
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _run(connection: Connection, folder: Path, work: Any, threads: int) -> None:
    try:
        job, make_observer = pickle.loads(work) if isinstance(work, bytes) else work
        torch.set_num_threads(threads)
        job.train(make_observer(connection), folder)
        connection.send({"event": "failed", "status": "failed", "reason": "the training run ended early"})
    except Finished:
        pass
    except BaseException as error:
        traceback.print_exc()
        connection.send({"event": "failed", **_describe(error)})


def _describe(error: BaseException) -> Mapping[str, str]:
    text = str(error).strip()
    memory = is_out_of_memory(error)
    name = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
    line = (text.splitlines() or [""])[0][:400]
    return {"status": "out of memory" if memory else "failed", "reason": name + line}
