"""End the whole job when one of its processes fails, where the others would hang in a collective.

Rank 0 keeps one connection to every other rank, and a thread of each process sleeps on its end of it. A process
says "bye" when it ends well and "failed" with its error when it does not. A connection that closes without a
word means that the process was killed: the operating system closes it, so no heartbeat is needed, and a process
that is stopped or busy for long raises no false alarm. Whoever learns of a failure prints one line and ends.
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
from slipstream.dist.threads import rest_gloo_threads

__all__ = ["announce_failure", "report_progress", "start_failure_detection", "stop_failure_detection"]

PATIENCE = 5.0  # seconds that a failed process gets to end before the others do
GRACE = 1.0  # seconds that a process gets to print an error of its own before another's failure ends it
LAST_RESORT = 30.0  # seconds that a failed process gets to end; a broken accelerator can hang it at exit

# One process has one default group, so it has one watch, and one thing that it does at a time.
_watch: Watch | None = None
_where: Callable[[], str] | None = None


def report_progress(where: Callable[[], str] | None) -> None:
    """Let messages about failures say where this process was: `where()` gives e.g. `iteration 57`.

    It is called once, from another thread, when a failure is reported; None takes it back.
    """
    global _where
    _where = where


def announce_failure(text: str) -> None:
    """Tell the other ranks that this one has failed, so that they end too.

    Uncaught exceptions announce themselves. A command line that prints an error of its own and ends with
    `sys.exit(1)` calls this first, since Python does not let anyone see the status of an exit.
    """
    if _watch is not None:
        _watch.announce(text)


def start_failure_detection() -> None:
    """Watch over the other ranks of the default group; every rank must call this. One process needs none."""
    global _watch
    rank, world_size = get_dist_info()
    Finalize(None, _end, exitpriority=-100)  # at exit, and at the end of a multiprocessing child
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
        _watch = Watch(rank, token, listener, connection)
        _install()
    else:
        warnings.warn(
            f"rank {rank} cannot reach rank 0 at port {port} of {', '.join(hosts)}: if one of them fails, the "
            "other will not end before its next collective fails",
            RuntimeWarning,
            stacklevel=3,
        )
    barrier()  # a rank that dies before all are connected breaks this, and nobody misses it later


def stop_failure_detection() -> None:
    """Say goodbye to the other ranks: this one has ended well."""
    global _watch
    if _watch is not None:
        _watch.leave()
        _watch = None


@dataclass
class Peer:
    """One end of a connection."""

    sock: socket.socket
    rank: int | None
    """None until it has said who it is."""
    unread: bytes = b""


class Watch:
    """The connections of one process, and the thread that waits for news on them."""

    def __init__(
        self, rank: int, token: str, listener: socket.socket | None = None, hub: socket.socket | None = None
    ) -> None:
        self.rank = rank
        self.known = threading.Event()  # another rank has failed
        self.failed = False  # this rank has failed
        self._token = token
        self._peers: dict[socket.socket, Peer] = {}
        self._lock = threading.Lock()  # of writing
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
        self._thread = threading.Thread(target=self._run, name="slipstream-watch", daemon=True)
        self._thread.start()

    def announce(self, text: str) -> None:
        """Tell every other rank that this one failed, unless another did so before."""
        if self.failed or self.known.is_set():
            return
        self.failed = True
        self._tell(f"failed {self.rank} failed{_progress()}: {_one_line(text)}")
        with self._lock:
            for sock in self._peers:
                # A copy that nobody closes: the others are to see the end of the process, not of its objects.
                os.dup(sock.fileno())
        # Runs without the interpreter, which by then may wait for a device that answers no more.
        faulthandler.dump_traceback_later(LAST_RESORT, exit=True, file=2)

    def report(self) -> None:
        """Print, once, who failed."""
        with self._lock:
            if not self._reported:
                self._reported = True
                print(f"slipstream: rank {self.rank} stops{_progress()}: {self._failure}", file=sys.stderr)

    def leave(self) -> None:
        """End the thread, then say goodbye: the others answer it by closing the connection."""
        self._wake.send(b"x")
        self._thread.join()
        self._tell("bye")
        self.close()

    def close(self) -> None:
        """Close the connections without a word."""
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
                elif not self._hear(self._peers[key.fileobj]):  # type: ignore[index]
                    return

    def _add(self, sock: socket.socket, rank: int | None) -> None:
        _keep_alive(sock)
        with self._lock:
            self._peers[sock] = Peer(sock, rank)
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, peer: Peer) -> bool:
        """Read what a peer says; return whether there is anything left to wait for."""
        try:
            data = peer.sock.recv(4096)
        except OSError:
            data = b""
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            if not self._understand(peer, line.decode(errors="replace")):
                return self.rank == 0
        if not data or (peer.rank is None and len(peer.unread) > 100):
            self._drop(peer)
            if peer.rank is not None:
                self._stop(peer.rank, f"rank {peer.rank} ended without a word (killed?)")
        return True

    def _understand(self, peer: Peer, line: str) -> bool:
        """Act on one line; return whether the peer will say more."""
        word, _, rest = line.partition(" ")
        if peer.rank is None and word == self._token and rest.isdecimal():
            peer.rank = int(rest)
            with contextlib.suppress(OSError):  # then it will not be heard of again either
                peer.sock.sendall(b"welcome\n")
            return True
        if peer.rank is not None and word == "failed":
            rank, _, what = rest.partition(" ")
            self._stop(int(rank), f"rank {rank} {what}", peer)
        self._drop(peer)  # it said bye, or it does not belong to this job
        return False

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.sock)
        with self._lock:
            del self._peers[peer.sock]
            peer.sock.close()

    def _tell(self, line: str) -> None:
        with self._lock:
            for peer in self._peers.values():
                if peer.rank is not None:
                    with contextlib.suppress(OSError):  # it has ended before us
                        peer.sock.sendall(f"{line}\n".encode())

    def _stop(self, rank: int, failure: str, source: Peer | None = None) -> None:
        """End this process because of another's failure; the hub passes the news on first."""
        if self.failed:
            return
        self._failure = failure
        self.known.set()
        if source is not None and source.rank == rank:
            # Launchers name the process that ends first as the cause.
            source.sock.settimeout(PATIENCE)
            with contextlib.suppress(OSError):
                while source.sock.recv(4096):
                    pass
        self._tell(f"failed {rank} {failure.removeprefix(f'rank {rank} ')}")
        time.sleep(GRACE)
        self.report()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def _listen() -> tuple[socket.socket, list[str]]:
    """Return rank 0's listening socket, and the names under which the others may find it."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    beside = os.environ.get("LOCAL_WORLD_SIZE")
    # The first of two machines may call itself 127.0.0.1, so that address alone does not mean one machine.
    if beside == str(dist.get_world_size()) or (not beside and master in ("localhost", "127.0.0.1", "::1")):
        return socket.create_server(("127.0.0.1", 0), backlog=4096), ["127.0.0.1"]
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=dual)
    # With torchrun the master may be another machine than that of rank 0.
    return listener, list(dict.fromkeys([master, socket.gethostname(), *_own_address(master)]))


def _own_address(master: str) -> list[str]:
    """Return the address of this machine on the network of the master; connecting UDP sends nothing."""
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
    """Notice after three minutes that a machine has vanished; its processes cannot close a connection."""
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
    """Announce uncaught exceptions; keep forked children, such as loader workers, off the connections."""
    sys.excepthook = functools.partial(_excepthook, sys.excepthook)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)


def _excepthook(
    previous: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    watch = _watch
    if watch is not None and _is_echo(error) and watch.known.wait(2):
        watch.report()  # the rank that failed is the news, not the connection to it that broke
        return
    previous(kind, error, trace)
    sys.stderr.flush()
    announce_failure(f"{kind.__name__}: {error}")


def _is_echo(error: BaseException | None) -> bool:
    """Say whether the error may be the mere consequence of another rank's failure."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__
    return False


def _forget() -> None:
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def _end() -> None:
    # At the end of a multiprocessing child the error that ends it is still on its way.
    error = sys.exception()
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        announce_failure(f"{type(error).__name__}: {error}")
    if _watch is not None and not (_watch.failed or _watch.known.is_set()):
        stop_failure_detection()
        if is_distributed():
            dist.destroy_process_group()
    rest_gloo_threads()
