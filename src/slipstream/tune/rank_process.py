"""One trial on all ranks of a process group. Each rank starts a process for data-parallel training."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from slipstream.dist import all_gather_object, init_dist
from slipstream.dist.failure_detection import is_consequence
from slipstream.dist.placement import Placement, read_placement
from slipstream.errors import ConfigError, DistributedError
from slipstream.tune.observer import Observer
from slipstream.tune.process import Job, Process, TrialError

__all__ = ["RankProcess", "call_on_all_ranks", "check_same_on_all_ranks"]

T = TypeVar("T")

_INTERVAL = 0.2
"""Seconds between two exchanges of the ranks' states."""
_GRACE = 1.0
"""Seconds that a rank waits for a report from its own trial after the trial of another rank has failed."""
_CONSEQUENCE_DELAY = 2.0
"""Seconds by which a rank delays an error that another rank's failure may have caused."""


class RankProcess:
    """A `Process` on each rank. All ranks must create it together, and call each method together.

    The processes form their own process group, so a trial takes as much memory and time as data-parallel training. The
    calling processes exchange the states of their trials several times per second. If the trial of one rank fails, all
    ranks raise the same error and kill their trials, so a trial that waits in a collective does not block its rank.

    Args:
        job: the run to execute on this rank; it must be picklable, because the processes are not forked.
        make_observer: see `Process`.

    Raises:
        ConfigError, DistributedError: the process could not be started on this rank or on another rank.
    """

    def __init__(self, job: Job, make_observer: Any) -> None:
        port = all_gather_object(_free_port())[0]
        self._process: Process | None = None

        def start() -> None:
            placement = _placement(port)
            self._process = Process(_RankJob(job, placement, _backend()), make_observer)

        try:
            call_on_all_ranks(start)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill this rank's process and all its descendants. Further calls have no effect."""
        if self._process is not None:
            self._process.end()

    def wait_for(self, event: str, seconds: float) -> dict[str, Any]:
        """Wait until the trials of all ranks have sent a message of type `event`. Return the message of rank 0.

        In this message, `seconds`, `peak_mib` and `buffered` are the largest values across all ranks.

        Raises:
            TrialError: the trial of a rank failed, ended, or did not respond within `seconds`.
        """
        return self._exchange(event, seconds, None)

    def time(self, steps: int, untimed: int, seconds: float) -> dict[str, Any]:
        """Run `untimed` untimed steps and then `steps` timed steps on all ranks; see `Process.time` and `wait_for`."""
        failure = None
        try:
            self._own.request(steps, untimed)
        except TrialError as error:
            failure = error
        return self._exchange("timed", seconds, failure)

    @property
    def _own(self) -> Process:
        assert self._process is not None
        return self._process

    def _exchange(self, event: str, seconds: float, own: _State) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            own = own or self._state(event, _INTERVAL)
            if own is None and time.monotonic() >= end:
                own = self._own.timeout(event, seconds)
            states = all_gather_object(own)
            if not any(isinstance(state, TrialError) for state in states):
                if all(states):
                    return _slowest(states)
                continue
            # The failure of one rank makes the others fail, so the cause may arrive after its consequences.
            raise _combined(states, all_gather_object(own or self._state(event, _GRACE)))

    def _state(self, event: str, seconds: float) -> _State:
        try:
            return self._own.poll(event, seconds)
        except TrialError as failure:
            return failure


_State = dict[str, Any] | TrialError | None
"""The message or the failure of one rank's trial; None while the trial is running."""


def call_on_all_ranks(call: Callable[[], T]) -> T:
    """Call `call()` on every rank and return this rank's result. An error on one rank raises an error on every rank.

    Raises:
        DistributedError: the call failed on another rank. On that rank, the original error is raised.
    """
    error, result = None, None
    try:
        result = call()
    except Exception as own:
        error = own
    texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise DistributedError(f"rank {rank} failed ({text}); fix the error on that rank")
    return result  # type: ignore[return-value]


def check_same_on_all_ranks(**values: Any) -> None:
    """Raise a `ConfigError` on every rank if a value differs between ranks."""
    for name, of_ranks in ((name, all_gather_object(value)) for name, value in values.items()):
        for rank, value in enumerate(of_ranks):
            if value != of_ranks[0]:
                raise ConfigError(
                    f"must be the same on all ranks, but it is {of_ranks[0]!r} on rank 0 and {value!r} on rank {rank}",
                    name,
                )


def _placement(port: int) -> Placement:
    """Return the placement of this rank's trial: that of this process, but with `port` as the port of the store.

    Under torchrun, a trial connects to the agent's store, as a restarted worker does, so the port does not change.
    """
    placement = read_placement("pytorch", os.environ)
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return placement if elastic else replace(placement, master_port=str(port))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def _slowest(messages: Sequence[Any]) -> dict[str, Any]:
    names = [name for name in ("seconds", "peak_mib", "buffered") if name in messages[0]]
    return {**messages[0], **{name: max(message[name] for message in messages) for name in names}}


def _combined(first: Sequence[_State], later: Sequence[_State]) -> TrialError:
    """Return the failure to report; out-of-memory errors take precedence over others, and timeouts come last."""
    failures = [(rank, state) for states in (first, later) for rank, state in enumerate(states)]
    order = ("out of memory", "failed", "timed out")
    rank, failure = min(
        ((rank, state) for rank, state in failures if isinstance(state, TrialError)),
        key=lambda item: order.index(item[1].status),
    )
    return TrialError(failure.status, f"rank {rank}: {failure.reason}", failure.warmup_seconds)


def _backend() -> str | None:
    """Return the backends of the default group, or None if the group was created without a backend name."""
    name = str(dist.get_backend())
    return None if name == "undefined" else name


# ---- in the trial's process ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RankJob:
    """Trains as one rank of a new process group."""

    job: Job
    placement: Placement
    backend: str | None

    def train(self, observer: Observer, folder: Path) -> None:
        """Train until the observer ends the trial; see `Job`."""
        os.environ.update(self.placement.environ())
        try:
            init_dist("pytorch", self.backend)
            self.job.train(observer, folder)
        except Exception as error:
            if is_consequence(error):
                time.sleep(
                    _CONSEQUENCE_DELAY
                )  # the rank that failed first reports the cause before this rank
            raise
