"""Failure detection: terminate all processes of a job when one fails, so that none of them hangs in a collective.

torchrun does this on one machine; this module also covers several machines, Slurm, MPI and multiprocessing. Rank 0
keeps a connection to every other rank, and a thread in each process waits for messages: "bye" from a process that exits
normally, or its error. If a connection closes without a message, the process was killed. No heartbeat is needed, so
a process that is stopped or busy for a long time causes no false alarm.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, Pipe, wait
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from slipstream.dist.info import barrier, get_dist_info, is_distributed
from slipstream.dist.objects import broadcast_object_list

PATIENCE = 5.0  # seconds that the other processes wait for a failed process to exit before they also exit
GRACE = 1.0  # seconds that a process has to print its own error before another rank's failure terminates it
EXIT_TIMEOUT = 30.0  # seconds until a failed process is killed; a broken accelerator can block its exit

# A process has one default group, so it has one failure detector and one current position.
_detector: FailureDetector | None = None
_where: Callable[[], str] | None = None


def report_progress(where: Callable[[], str] | None) -> None:
    """Register a function that returns the current position, such as `iteration 57`, for failure messages.

    Failure detection calls `where()` when it reports a failure, possibly from a different thread. Pass None to
    unregister the function.
    """
    global _where
    _where = where


def announce_failure(text: str) -> None:
    """Notify the other ranks that this rank has failed, so that they also exit.

    Uncaught exceptions are announced automatically. A command-line program that prints its own error and calls
    `sys.exit(1)` must call this function first, because exit handlers cannot read the exit status.
    """
    if _detector is not None:
        _detector.announce(text)


def another_rank_failed() -> bool:
    """Return whether another rank has failed, in which case this process is about to exit."""
    return _detector is not None and _detector.peer_failed.is_set()


def start_failure_detection() -> None:
    """Start failure detection in the default group if it has several processes. All ranks must call this function."""
    global _detector
    rank, world_size = get_dist_info()
    Finalize(None, _at_exit, exitpriority=-100)  # runs at exit, and at the end of a child process
    if world_size == 1:
        return
    stop_failure_detection()
    listener: Listener | None = None
    address: list[Any] = [[], 0, b""]
    if rank == 0:
        token = secrets.token_bytes(16)
        hosts = _hosts(world_size)
        listener = Listener((hosts[0] if len(hosts) == 1 else "", 0), backlog=4096, authkey=token)
        address = [hosts, listener.address[1], token]
    broadcast_object_list(address)
    connection = None if listener else _connect(rank, *address)
    if listener or connection:
        _detector = FailureDetector(rank, connection)
        _install()
        if listener:
            thread = threading.Thread(target=_detector.accept, args=(listener, world_size - 1), daemon=True)
            thread.start()
    else:
        warnings.warn(
            f"rank {rank} cannot connect to rank 0 on port {address[1]} ({', '.join(address[0])}). If one of the two "
            "fails, the other will not exit until its next collective fails. Allow connections between the machines on "
            "all ports",
            RuntimeWarning,
            stacklevel=3,
        )
    barrier()  # raises an error if a rank exits before all ranks are connected


def stop_failure_detection() -> None:
    """Stop failure detection and notify the other ranks that this rank is exiting normally."""
    global _detector
    if _detector is not None:
        _detector.leave()
        _detector = None


class FailureDetector:
    """Connections of one process, and the thread that reads messages from them."""

    def __init__(self, rank: int, hub: Connection[Any, Any] | None = None) -> None:
        self.rank = rank
        self.peer_failed = threading.Event()  # set when another rank has failed
        self.failed = False  # whether this rank has failed
        self._peers: dict[Connection[Any, Any], int] = {} if hub is None else {hub: 0}
        self._wake, self._woken = Pipe()
        self._lock = threading.Lock()  # protects messages
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="slipstream-failure-detection", daemon=True)
        self._thread.start()

    def accept(self, listener: Listener, count: int) -> None:
        """Wait for `count` ranks to connect. Other programs, such as port scanners, do not know the token."""
        with listener:
            while len(self._peers) < count:
                with contextlib.suppress(AuthenticationError, EOFError, OSError):
                    connection = listener.accept()
                    _keep_alive(connection)
                    self._peers[connection] = int(connection.recv_bytes())
                    self._wake.send_bytes(b"peer")
                    connection.send_bytes(b"welcome")

    def announce(self, text: str) -> None:
        """Notify all other ranks that this rank failed, unless another rank failed first."""
        if not self.failed and not self.peer_failed.is_set():
            self.failed = True
            self._send(f"{self.rank} failed{_progress()}: {' '.join(text.split())[:500]}")
            # This timer does not need the interpreter, which may be blocked by an unresponsive device.
            faulthandler.dump_traceback_later(EXIT_TIMEOUT, exit=True, file=2)

    def report(self) -> None:
        """Print the failure of the other rank, unless it has already been printed."""
        with self._lock:
            if self._failure:
                print(
                    f"slipstream: rank {self.rank} is stopping{_progress()}: {self._failure}", file=sys.stderr
                )
                self._failure = ""

    def leave(self) -> None:
        """Stop the thread and send "bye"."""
        self._wake.send_bytes(b"stop")
        self._thread.join()
        self._send("bye")
        self.close()

    def close(self) -> None:
        """Close the connections without a message."""
        for connection in (self._wake, self._woken, *self._peers):
            connection.close()

    def _run(self) -> None:
        while not self.failed:
            for connection in wait([self._woken, *self._peers]):
                if connection is self._woken:
                    if self._woken.recv_bytes() == b"stop":
                        return
                else:
                    self._receive(connection)  # type: ignore[arg-type]

    def _receive(self, connection: Connection[Any, Any]) -> None:
        rank = self._peers[connection]
        try:
            message = connection.recv_bytes().decode()
        except (EOFError, OSError):
            message = f"{rank} exited without reporting an error (killed?)"
        if message == "bye":
            del self._peers[connection]
            connection.close()
        elif not self.failed:
            self._exit(message, connection if message.startswith(f"{rank} failed") else None)

    def _send(self, message: str) -> None:
        with self._lock:
            for connection in list(self._peers):
                with contextlib.suppress(OSError):  # the peer has already exited
                    connection.send_bytes(message.encode())

    def _exit(self, message: str, failed: Connection[Any, Any] | None) -> None:
        """Terminate this process because another rank failed; rank 0 first forwards the message to the other ranks."""
        self._failure = f"rank {message}"
        self.peer_failed.set()
        if failed is not None:
            # Launchers report the process that exits first as the cause, so let the failed process exit first.
            failed.poll(PATIENCE)
        if self.rank == 0:
            self._send(message)
        time.sleep(GRACE)
        self.report()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def _hosts(world_size: int) -> list[str]:
    """Return the host names to which the other ranks can connect."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    # In a job with two machines, MASTER_ADDR may be 127.0.0.1 on the first machine.
    if local == str(world_size) or (not local and master in ("localhost", "127.0.0.1", "::1")):
        return ["127.0.0.1"]
    # With torchrun, the master may run on a different machine than rank 0.
    hosts = [master, socket.gethostname()]
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            # For UDP, this sends no packet, but selects this machine's address on the network.
            sock.connect(address)
            hosts.append(sock.getsockname()[0])
    return hosts


def _connect(rank: int, hosts: list[str], port: int, token: bytes) -> Connection[Any, Any] | None:
    for host in dict.fromkeys([os.environ.get("MASTER_ADDR", "localhost"), *hosts]):
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            socket.create_connection((host, port), timeout=10).close()  # `Client` has no timeout
            connection = Client((socket.gethostbyname(host), port), authkey=token)
            connection.send_bytes(str(rank).encode())
            if connection.recv_bytes() == b"welcome":
                _keep_alive(connection)
                return connection
    return None


def _keep_alive(connection: Connection[Any, Any]) -> None:
    """Enable TCP keepalive, which detects after three minutes that a peer's machine is down."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _progress() -> str:
    if _where is not None:
        with contextlib.suppress(Exception):
            return f" at {_where()}"
    return ""


@functools.cache
def _install() -> None:
    """Install hooks to announce uncaught exceptions and to close connections in forked processes (loader workers)."""
    sys.excepthook = functools.partial(_excepthook, sys.excepthook)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_in_child)


def _excepthook(
    previous: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    detector = _detector
    if detector is not None and is_consequence(error) and detector.peer_failed.wait(2):
        detector.report()  # report the failed rank, not the broken connection to it
        return
    previous(kind, error, trace)
    sys.stderr.flush()
    announce_failure(f"{kind.__name__}: {error}")


def is_consequence(error: BaseException | None) -> bool:
    """Return whether the error may be a consequence of another rank's failure."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__
    return False


def _close_in_child() -> None:
    global _detector
    if _detector is not None:
        _detector.close()
        _detector = None


def _at_exit() -> None:
    # If an error ends a multiprocessing child process, the error is still being handled at this point.
    error = sys.exception()
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        announce_failure(f"{type(error).__name__}: {error}")
    if _detector is not None and not (_detector.failed or _detector.peer_failed.is_set()):
        stop_failure_detection()
        if is_distributed():
            dist.destroy_process_group()
    _wait_for_gloo_threads()


def _wait_for_gloo_threads(timeout: float = 2.0) -> None:
    """Wait until all gloo threads are idle, for at most `timeout` seconds, which must be less than `PATIENCE`.

    A gloo thread releases the tensors of a collective shortly after the collective returns, and acquires the GIL to do
    so. If the interpreter is already shutting down, Python before 3.14 ends the thread in a way that aborts the process
    ("terminate called without an active exception", pytorch/pytorch#190489).
    """
    deadline = time.monotonic() + timeout
    previous: list[tuple[str, str]] = []
    while (current := _gloo_threads()) and time.monotonic() < deadline:
        if current == previous and all(state == "S" for state, _ in current):
            return
        previous = current
        time.sleep(2 * sys.getswitchinterval())  # waiting threads try to acquire the GIL once per interval


def _gloo_threads() -> list[tuple[str, str]]:
    """Return the state (`S`: sleeping) and the number of voluntary context switches of each gloo thread."""
    states = []
    for path in sorted(Path("/proc/self/task").glob("*/status")):
        with contextlib.suppress(OSError):  # the thread has ended
            status = dict(line.split(":\t", 1) for line in path.read_text().splitlines())
            if status["Name"] == "pt_gloo_runloop":
                states.append((status["State"][0], status["voluntary_ctxt_switches"]))
    return states
