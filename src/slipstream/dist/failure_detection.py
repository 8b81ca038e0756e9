"""Failure detection: terminate all processes of a job when one fails, so that none of them hangs in a collective.

Rank 0 keeps a connection to every other rank, and a thread in each process waits for messages. A process
sends "bye" when it exits normally and "failed" with its error when it fails. If a connection closes without a
message, the process was killed and the operating system closed the connection. No heartbeat is needed, and a
process that is stopped or busy for a long time causes no false alarm. A process that receives a failure message prints
one line and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from slipstream.dist.info import barrier, get_dist_info, is_distributed
from slipstream.dist.objects import broadcast_object_list
from slipstream.dist.threads import wait_for_gloo_threads

__all__ = [
    "announce_failure",
    "another_rank_failed",
    "is_consequence",
    "report_progress",
    "start_failure_detection",
    "stop_failure_detection",
]

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
    token = secrets.token_hex(16)
    listener, hosts = _listen() if rank == 0 else (None, [])
    port = listener.getsockname()[1] if listener else 0
    address = [(hosts, port, token)]
    broadcast_object_list(address)
    hosts, port, token = address[0]
    hosts = list(dict.fromkeys([os.environ.get("MASTER_ADDR", "localhost"), *hosts]))
    connection = None if listener else _connect(hosts, port, f"{token} {rank}\n")
    if listener or connection:
        _detector = FailureDetector(rank, token, listener, connection)
        _install()
    else:
        warnings.warn(
            f"rank {rank} cannot connect to rank 0 on port {port} ({', '.join(hosts)}). If one of the two "
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


@dataclass
class Peer:
    """A connection to another process."""

    sock: socket.socket
    rank: int | None
    """None until the peer has sent its rank."""
    unread: bytes = b""


class FailureDetector:
    """Connections of one process, and the thread that reads messages from them."""

    def __init__(
        self, rank: int, token: str, listener: socket.socket | None = None, hub: socket.socket | None = None
    ) -> None:
        self.rank = rank
        self.peer_failed = threading.Event()  # set when another rank has failed
        self.failed = False  # whether this rank has failed
        self._token = token
        self._peers: dict[socket.socket, Peer] = {}
        self._lock = threading.Lock()  # protects writes
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._failure = ""
        self._reported = False
        for sock in (self._woken, listener):
            if sock is not None:
                self._selector.register(sock, selectors.EVENT_READ)
        if hub is not None:
            self._add(hub, 0)
        self._thread = threading.Thread(target=self._run, name="slipstream-failure-detection", daemon=True)
        self._thread.start()

    def announce(self, text: str) -> None:
        """Notify all other ranks that this rank failed, unless another rank failed first."""
        if self.failed or self.peer_failed.is_set():
            return
        self.failed = True
        self._send(f"failed {self.rank} failed{_progress()}: {_one_line(text)}")
        with self._lock:
            for sock in self._peers:
                # Keep a duplicate open: the connection must close when the process ends, not when `sock` is freed.
                os.dup(sock.fileno())
        # This timer does not need the interpreter, which may be blocked by an unresponsive device.
        faulthandler.dump_traceback_later(EXIT_TIMEOUT, exit=True, file=2)

    def report(self) -> None:
        """Print the failure, unless it has already been printed."""
        with self._lock:
            if not self._reported:
                self._reported = True
                print(
                    f"slipstream: rank {self.rank} is stopping{_progress()}: {self._failure}", file=sys.stderr
                )

    def leave(self) -> None:
        """Stop the thread and send "bye"; the peers then close their connections."""
        self._wake.send(b"x")
        self._thread.join()
        self._send("bye")
        self.close()

    def close(self) -> None:
        """Close the connections without a message."""
        for sock in (self._listener, self._wake, self._woken, *self._peers):
            if sock is not None:
                sock.close()
        self._selector.close()

    def _run(self) -> None:
        while not self.failed:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self._add(self._listener.accept()[0], None)
                elif not self._receive(self._peers[key.fileobj]):  # type: ignore[index]
                    return

    def _add(self, sock: socket.socket, rank: int | None) -> None:
        _keep_alive(sock)
        with self._lock:
            self._peers[sock] = Peer(sock, rank)
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, peer: Peer) -> bool:
        """Read the messages from a peer, and return whether to keep waiting for messages."""
        try:
            data = peer.sock.recv(4096)
        except OSError:
            data = b""
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            if not self._handle(peer, line.decode(errors="replace")):
                return self.rank == 0
        if not data or (peer.rank is None and len(peer.unread) > 100):
            self._remove(peer)
            if peer.rank is not None:
                self._exit(peer.rank, f"rank {peer.rank} exited without reporting an error (killed?)")
        return True

    def _handle(self, peer: Peer, line: str) -> bool:
        """Process one message, and return whether the peer may send more messages."""
        command, _, rest = line.partition(" ")
        if peer.rank is None and command == self._token and rest.isdecimal():
            peer.rank = int(rest)
            with contextlib.suppress(OSError):  # the peer has already disconnected
                peer.sock.sendall(b"welcome\n")
            return True
        if peer.rank is not None and command == "failed":
            rank, _, message = rest.partition(" ")
            self._exit(int(rank), f"rank {rank} {message}", peer)
        self._remove(peer)  # the peer sent "bye", or it does not belong to this job
        return False

    def _remove(self, peer: Peer) -> None:
        self._selector.unregister(peer.sock)
        with self._lock:
            del self._peers[peer.sock]
            peer.sock.close()

    def _send(self, line: str) -> None:
        with self._lock:
            for peer in self._peers.values():
                if peer.rank is not None:
                    with contextlib.suppress(OSError):  # the peer has already exited
                        peer.sock.sendall(f"{line}\n".encode())

    def _exit(self, rank: int, failure: str, source: Peer | None = None) -> None:
        """Terminate this process because another rank failed; rank 0 first forwards the failure to the other ranks."""
        if self.failed:
            return
        self._failure = failure
        self.peer_failed.set()
        if source is not None and source.rank == rank:
            # Launchers report the process that exits first as the cause, so let the failed process exit first.
            source.sock.settimeout(PATIENCE)
            with contextlib.suppress(OSError):
                while source.sock.recv(4096):
                    pass
        self._send(f"failed {rank} {failure.removeprefix(f'rank {rank} ')}")
        time.sleep(GRACE)
        self.report()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def _listen() -> tuple[socket.socket, list[str]]:
    """Return the listening socket of rank 0, and the host names to which the other ranks can connect."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    # In a job with two machines, MASTER_ADDR may be 127.0.0.1 on the first machine.
    if local == str(dist.get_world_size()) or (not local and master in ("localhost", "127.0.0.1", "::1")):
        return socket.create_server(("127.0.0.1", 0), backlog=4096), ["127.0.0.1"]
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=dual)
    # With torchrun, the master may run on a different machine than rank 0.
    return listener, list(dict.fromkeys([master, socket.gethostname(), *_own_address(master)]))


def _own_address(master: str) -> list[str]:
    """Return this machine's address on the master's network. Connecting a UDP socket sends no packet."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return [sock.getsockname()[0]]
    return []


def _connect(hosts: list[str], port: int, hello: str) -> socket.socket | None:
    for host in hosts:
        with contextlib.suppress(OSError):
            sock = socket.create_connection((host, port), timeout=10)
            with contextlib.suppress(OSError):
                sock.sendall(hello.encode())
                if sock.recv(8) == b"welcome\n":
                    sock.settimeout(None)
                    return sock
            sock.close()
    return None


def _keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive, which detects after three minutes that a peer's machine is down."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _progress() -> str:
    if _where is not None:
        with contextlib.suppress(Exception):
            return f" at {_where()}"
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


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
    wait_for_gloo_threads()
