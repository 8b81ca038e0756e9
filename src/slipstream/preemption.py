"""Stop a training loop after the same step on all ranks when any rank receives a signal."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from slipstream.dist import another_rank_failed, broadcast_object_list, get_rank, get_world_size
from slipstream.errors import DistributedError

# Name, without suffix, of the checkpoint that a Runner saves after a signal.
CHECKPOINT_NAME = "preempted"

# Exit status of a run that stopped after a signal (`EX_TEMPFAIL` in sysexits.h, which means "try again").
EXIT_STATUS = 75
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
# The value of `Preemption.signal` after the time limit.
TIME_LIMIT = "time limit"
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
# Signals that arrive within this many seconds of the first one are ignored, because launchers and terminals can send a
# signal twice.
_REPEAT_INTERVAL = 1.0
# Seconds between checks for a signal on another rank.
_POLL_INTERVAL = 0.25
# Time within which every rank must report its step after a signal.
_TIMEOUT = timedelta(seconds=30)


class Preempted(SystemExit):
    """Raised when a run stops after a signal. If the exception is not caught, Python exits with status `EXIT_STATUS`.

    `iteration` is the number of steps completed in the saved state, or None if no step was run and no state was saved.
    """

    def __init__(self, iteration: int | None = None) -> None:
        super().__init__(EXIT_STATUS)
        self.iteration = iteration


class Interrupted(Preempted, KeyboardInterrupt):
    """Raised when a run stops after SIGINT (Ctrl-C)."""


class Preemption:
    """Handle SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 in the `with` block.

    The training loop can then stop after a complete step.

        with Preemption() as preemption:
            for batch in loader:
                step(batch)
                if preemption.requested():
                    torch.save(...)
                    sys.exit(slipstream.preemption.EXIT_STATUS)

    A second signal, more than one second after the first, has its default effect and terminates the process. Signals
    that the process ignores (`nohup`), or for which it has already installed a handler, are not handled. Python can
    handle signals only in the main thread; if the block is entered in another thread, this process reacts only to
    signals that other ranks receive. All ranks must enter the block.

    Args:
        max_seconds: time after entering the block at which `requested` returns True without a signal; None for no
            limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        # Name of the signal that a rank received, `TIME_LIMIT`, or None if there is no reason to stop.
        self.signal: str | None = None
        self._max_seconds, self._timer = max_seconds, threading.Timer(0, lambda: None)
        self._calls, self._owner = 0, 0
        self._received: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._agreement: _RankAgreement | None = None

    def __enter__(self) -> Self:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in _DEFAULT_HANDLERS:
                    self._previous[number] = signal.signal(number, self._handle)
        if self._max_seconds is not None:
            self._timer = threading.Timer(self._max_seconds, self._reach_time_limit)
            self._timer.daemon = True
            self._timer.start()
        if get_world_size() > 1:
            self._agreement = _RankAgreement(self)
        return self

    def _reach_time_limit(self) -> None:
        self.signal = self.signal or TIME_LIMIT

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        self._restore()

    def requested(self) -> bool:
        """Return whether to save the state and stop. Every rank must call this method after each step.

        All ranks return True after the same step. Before there is a reason to stop, a call takes less than a
        microsecond.
        """
        self._calls += 1
        if self._agreement is None:
            return self.signal is not None
        return self._agreement.signal_seen and self._calls >= self._agreement.stop_call()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked process, such as a data loader worker, inherits the handler
            if number == signal.SIGTERM:  # `Process.terminate` and `Pool.terminate` must end the process
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if self._received is None:
            self._received, self.signal = now, self.signal or signal.Signals(number).name
            if another_rank_failed():
                return  # the launcher stops the other ranks with SIGTERM
            _print(
                f"\n{signal.Signals(number).name} received: training will stop within the next few steps; "
                "send the signal again to exit immediately\n"
            )
        elif now - self._received > _REPEAT_INTERVAL:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)


def _print(text: str) -> None:
    """Write to stderr. Ignore errors, because stderr may be closed: SIGHUP is sent when the terminal closes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore[union-attr]


class _RankAgreement:
    """Makes all ranks agree on which call to `requested` is the first to return True.

    On each rank, a thread checks for a signal. After a signal, each rank publishes the number of times that it has
    called `requested`. If the largest of these numbers is n, training stops at call n + 1. No rank can have passed this
    call, because `requested` waits for the result once `signal_seen` is True.
    """

    def __init__(self, preemption: Preemption) -> None:
        token: list[Any] = [secrets.token_hex(4)]
        broadcast_object_list(token)
        # The clone has its own connection. On a shared connection, a blocking operation would delay all others.
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"slipstream/preemption/{token[0]}", default.clone())
        self._preemption = preemption
        self.signal_seen = False
        self._stop_call: int | None = None
        self._failure: Exception | None = None
        self._agreed, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-preemption", daemon=True)
        self._thread.start()

    def stop_call(self) -> int:
        """Wait until the ranks have agreed; return the number of the first call that returns True."""
        self._agreed.wait()
        if self._stop_call is None:
            raise DistributedError(
                f"not all ranks responded to {self._preemption.signal} ({self._failure}); "
                "all progress since the last checkpoint is lost. Resume from that checkpoint"
            )
        return self._stop_call

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.wait(_POLL_INTERVAL):
                if self._preemption.signal is not None:
                    self._store.compare_set("signal", "", self._preemption.signal)  # the first one counts
                if self._store.check(["signal"]):
                    self._agree()
                    return
            self._publish()  # without this, ranks that wait for this rank would time out
        except Exception as error:  # the store runs in another process, which may have exited
            self._failure = error
        finally:
            self._agreed.set()

    def _agree(self) -> None:
        self.signal_seen = True  # set before the count is published, so that `requested` waits for the result
        self._preemption.signal = self._store.get("signal").decode()
        self._publish()
        keys = [f"calls/{rank}" for rank in range(get_world_size())]
        self._store.wait(keys, _TIMEOUT)
        self._stop_call = 1 + max(int(self._store.get(key)) for key in keys)

    def _publish(self) -> None:
        self._store.set(f"calls/{get_rank()}", str(self._preemption._calls))
