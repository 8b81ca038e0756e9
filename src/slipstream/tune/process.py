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
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slipstream.devices import is_out_of_memory
from slipstream.dist import all_gather_object, init_dist, is_distributed
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.tune.observer import Finished, Observer, Timer

# Number of initial steps whose losses are compared. Timing starts after these steps.
WARMUP = 6
_LOG = "output.log"
# Seconds between two exchanges of the states of the ranks' trials.
_INTERVAL = 0.2
# The failures of trials, in the order in which they are reported if ranks fail for different reasons.
_STATUSES = ("out of memory", "failed", "timed out")


class Job(Protocol):
    """A training run that a trial can execute. It must be picklable unless `forks()` returns True."""

    def train(self, observer: Observer, folder: Path) -> None:
        """Train until `observer` raises `Finished`; write files only in `folder`, which is deleted afterwards."""


class TrialError(Exception):
    """A trial ended without a result.

    Args:
        status: `out of memory`, `timed out` or `failed`.
        reason: a one-line description.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(status, reason)  # pickle passes these arguments to the constructor
        self.status, self.reason = status, reason

    def __str__(self) -> str:
        return self.reason


def format_seconds(seconds: float) -> str:
    """Return a duration with two significant digits, or in whole seconds if it is 10 s or longer."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's descendants; an empty list on systems other than Linux."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, file.read_text().split())
    return [*children, *(each for child in children for each in descendants(child))]


def kill(processes: Iterable[int]) -> None:
    """Kill the processes, some of which may have ended, such as Inductor's workers."""
    for pid in processes:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def forks() -> bool:
    """Return whether trial processes are forked.

    A forked process cannot use an accelerator or the process group of its parent process.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available() and not is_distributed()


class Process:
    """A process that runs a job. At the end of a `with` block, the process and all its descendants are killed.

    If a process group exists, all of its ranks must create a `Process` together, and call each method together. The
    processes then form their own process group, so a trial takes as much memory and time as data-parallel training. If
    the trial of one rank fails, the methods raise an error on all ranks.

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
        # Durations of the steps reported so far, in seconds.
        self.warmup_seconds: list[float] = []
        arguments = (child_connection, work, self._folder, torch.get_num_threads(), fork, _group())
        self._process = context.Process(target=_main, args=arguments)
        try:
            self._process.start()
        except BaseException:
            self.end()
            raise
        child_connection.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_for(self, event: str, seconds: float) -> dict[str, Any]:
        """Wait for the next message of type `event` and return it.

        With several ranks, this is the message of rank 0 with the largest times and memory of all ranks.

        Args:
            event: `warm`, `timed` or `sweep`.
            seconds: the timeout in seconds.

        Raises:
            TrialError: the run failed, ended, or did not respond within `seconds`.
        """
        end = time.monotonic() + seconds
        own = None
        while True:
            own = own or self._poll(event, end)
            states = all_gather_object(own)
            if any(isinstance(state, TrialError) for state in states):
                if len(states) > 1:  # the failure of one rank makes the others fail; wait for the cause
                    time.sleep(5 * _INTERVAL)
                    states += all_gather_object(self._poll(event, end))
                failures = [state for state in states if isinstance(state, TrialError)]
                raise min(failures, key=lambda failure: _STATUSES.index(failure.status))
            if all(states):
                names = [name for name in ("seconds", "peak_mib", "buffered") if name in states[0]]
                return {**states[0], **{name: max(state[name] for state in states) for name in names}}

    def time(self, steps: int, untimed: int, seconds: float) -> dict[str, Any]:
        """Run `untimed` untimed steps and then `steps` timed steps.

        Returns:
            A dict with `seconds` (the mean step time), `peak_mib` and `loss`.

        Raises:
            TrialError: see `wait_for`.
        """
        with suppress(OSError):  # if the run has ended, `wait_for` raises the error
            self._connection.send((steps, untimed))
        return self.wait_for("timed", seconds)

    def end(self) -> None:
        """Kill the process and all its descendants. Further calls have no effect."""
        if self._connection.closed:
            return  # the process id may already belong to another process
        if self._process.pid is not None:
            kill([*descendants(self._process.pid), self._process.pid])
            self._process.join()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _poll(self, event: str, end: float) -> dict[str, Any] | TrialError | None:
        """Return the next message of type `event`, an error, or None if there is no message yet."""
        try:
            while self._connection.poll(max(min(end - time.monotonic(), _INTERVAL), 0)):
                message: dict[str, Any] = self._connection.recv()
                if message["event"] == "step":
                    self.warmup_seconds.append(message["seconds"])
                elif message["event"] == "failed":
                    return TrialError(message["status"], message["reason"])
                elif message["event"] == event:
                    return message
        except (EOFError, OSError):
            return self._exit_error()
        if time.monotonic() < end:
            return None
        return TrialError(
            "timed out", f"only {len(self.warmup_seconds)} steps finished within the time limit"
        )

    def _exit_error(self) -> TrialError:
        self._process.join(10)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            reason = "killed by SIGKILL, most likely because the system ran out of memory"
            return TrialError("out of memory", reason)
        lines = (self._folder / _LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        name = (
            f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
        )
        return TrialError("failed", ": ".join([name, *(line[:300] for line in lines[-1:])]))


def _pickle(job: Job, make_observer: Any) -> bytes:
    try:
        return pickle.dumps((job, make_observer))
    except Exception as error:  # pickle raises many types of errors
        raise ConfigError(
            "the model, the loader, the optimizer and the loss cannot be copied to another process "
            f"({error}); define them at the top level of a module, not in a function or as a lambda"
        ) from error


def _group() -> tuple[str, str] | None:
    """Return the backend and the port for the process group of the ranks' trials; None without a process group."""
    if not is_distributed():
        return None
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return str(dist.get_backend()), str(all_gather_object(port)[0])


# ---- in the trial's process ----------------------------------------------------------------------------------------


def _main(connection: Connection, work: Any, folder: Path, threads: int, forked: bool, group: Any) -> None:
    """Run the job of a trial. This function does not return."""
    try:
        _isolate(folder / _LOG)
        if forked:
            gc.freeze()  # prevents finalizers of the parent's objects from running
        # In a forked process, the parent's OpenMP threads do not exist, but a new thread starts its own. The thread
        # gets a copy of the context, because torch's settings are context variables.
        context, arguments = contextvars.copy_context(), (_run, connection, folder, work, threads, group)
        thread = threading.Thread(target=context.run, args=arguments, daemon=True)
        thread.start()
        thread.join()
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
    for number in (signal.SIGINT, signal.SIGTERM):  # inherited handlers would keep a trial alive
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target in (1, 2):
        os.dup2(file, target)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _run(connection: Connection, folder: Path, work: Any, threads: int, group: Any) -> None:
    try:
        job, make_observer = pickle.loads(work) if isinstance(work, bytes) else work
        torch.set_num_threads(threads)
        if group is not None:
            backend, port = group
            os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
            init_dist("pytorch", None if backend == "undefined" else backend)
        job.train(make_observer(connection), folder)
        connection.send({"event": "failed", "status": "failed", "reason": "the training run ended early"})
    except Finished:
        pass
    except BaseException as error:
        traceback.print_exc()
        connection.send({"event": "failed", **_describe(error)})


def _describe(error: BaseException) -> Mapping[str, str]:
    name = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
    line = (str(error).strip().splitlines() or [""])[0][:400]
    return {"status": "out of memory" if is_out_of_memory(error) else "failed", "reason": name + line}
