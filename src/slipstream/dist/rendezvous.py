"""Rendezvous of all processes in a job. Errors report missing ranks and incorrect environment variables."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from slipstream.dist.placement import Placement
from slipstream.errors import DistributedError

__all__ = ["open_store"]


def open_store(placement: Placement, seconds: float) -> Store:
    """Return a store for this job after every rank has connected to it; rank 0 or torchrun runs the server.

    Args:
        placement: placement of this process; rank 0 (or torchrun) listens on `master_port`.
        seconds: timeout for connecting to rank 0, and then for waiting for the other ranks.

    Raises:
        DistributedError: if a rank is missing, connects twice or has a different world size, or if rank 0 cannot be
            reached or cannot open its port. Every connected rank raises this error. The message names the
            environment variables and their values.
    """
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = placement.rank == 0 and not elastic
    store = _serve(placement, seconds) if serves else _connect(placement, seconds)
    try:
        # torchrun keeps its store when it restarts the processes, so the counter is not reset.
        is_leader = placement.rank == 0 and (elastic or store.add("rank 0", 1) == 1)
        return _gather(placement, store, seconds) if is_leader else _follow(placement, store, seconds)
    except dist.DistError as error:
        raise DistributedError(
            f"rank 0 did not respond at {_master(placement)} during the rendezvous; check whether rank 0 is running, "
            "and if it has exited, read its error message"
        ) from error


def _serve(placement: Placement, seconds: float) -> Store:
    try:
        return _store(placement, seconds, serves=True)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise DistributedError(
                f"rank 0 could not open its port: {placement.describe('MASTER_PORT')} is in use on this machine by "
                "another job or another rank 0; set MASTER_PORT to a free port, and use the same port for every process"
            ) from error
        raise DistributedError(
            f"rank 0 is running on {socket.gethostname()!r}, but could not connect to itself at {_master(placement)} "
            f"within {seconds:g} s; set MASTER_ADDR to the address of this machine"
        ) from error


def _connect(placement: Placement, seconds: float) -> Store:
    try:
        socket.getaddrinfo(placement.master_addr, int(placement.master_port))
    except OSError as error:
        raise DistributedError(
            f"{placement.describe('MASTER_ADDR')} could not be resolved on {socket.gethostname()!r}: {error}; "
            "set MASTER_ADDR to the host name or IP address of the machine that runs rank 0"
        ) from error
    # Another program may accept the connection and never respond. torch has no timeout for this case.
    result: queue.SimpleQueue[Store | dist.DistError] = queue.SimpleQueue()
    threading.Thread(target=lambda: result.put(_try_to_connect(placement, seconds)), daemon=True).start()
    try:
        store = result.get(timeout=3 * seconds + 10)
    except queue.Empty:
        raise DistributedError(
            f"the program listening at {_master(placement)} did not respond; set MASTER_PORT to a free port, and "
            "use the same port for every process"
        ) from None
    if isinstance(store, dist.DistError):
        raise DistributedError(
            f"rank {placement.rank} on {socket.gethostname()!r} could not connect to rank 0 at {_master(placement)} "
            f"within {seconds:g} s; check that rank 0 is running at this address with the same MASTER_PORT, and that "
            "no firewall blocks the connection"
        ) from store
    return store


def _try_to_connect(placement: Placement, seconds: float) -> Store | dist.DistError:
    try:
        return _store(placement, seconds)
    except dist.DistError as error:
        return error


def _store(placement: Placement, seconds: float, serves: bool = False) -> Store:
    return TCPStore(
        placement.master_addr,
        int(placement.master_port),
        placement.world_size,
        is_master=serves,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def _gather(placement: Placement, store: Store, seconds: float) -> Store:
    """Create a session on rank 0, count the ranks that connect, and publish the result.

    The result is an error message, or an empty string on success. After a restart, torchrun's store contains the
    earlier keys; the session's prefix separates them from the new keys.
    """
    session = secrets.token_hex(8)
    session_store = PrefixStore(session, store)
    session_store.add("arrived", 1)
    session_store.set("info/1", json.dumps(_info(placement)))
    error = _verify(placement, store, session_store, session, seconds)
    session_store.set("error", error)
    if error:
        _wait_for_readers(session_store)
        raise DistributedError(error)
    return session_store


def _follow(placement: Placement, store: Store, seconds: float) -> Store:
    """Request the session from rank 0, join it and wait for the result."""
    # Rank 0 may start up to `seconds` later than this rank and then wait for `seconds`.
    timeout = timedelta(seconds=2 * seconds + 10)
    session_key = f"session/{store.add('requests', 1)}"
    store.wait([session_key], timeout)
    session_store = PrefixStore(store.get(session_key).decode(), store)
    session_store.set(f"info/{session_store.add('entries', 1) + 1}", json.dumps(_info(placement)))
    session_store.add("arrived", 1)
    session_store.wait(["error"], timeout)
    error = session_store.get("error").decode()
    session_store.add("read", 1)
    if error:
        raise DistributedError(error)
    return session_store


def _verify(placement: Placement, store: Store, session_store: Store, session: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    pause = 0.001
    seen: set[int] = set()
    num_answered = num_read = 0
    while len(seen) < placement.world_size:
        requests, arrived = store.add("requests", 0), session_store.add("arrived", 0)
        for index in range(num_answered + 1, requests + 1):
            store.set(f"session/{index}", session)
        for index in range(num_read + 1, arrived + 1):
            info = json.loads(session_store.get(f"info/{index}"))
            if error := _conflict(placement, info, seen):
                return error
            seen.add(info["rank"])
        num_answered, num_read = requests, arrived
        if len(seen) < placement.world_size and time.monotonic() > deadline:
            missing = set(range(placement.world_size)) - seen
            return (
                f"{placement.describe('WORLD_SIZE')}, but only {_ranks(seen)} connected to {_master(placement)} within "
                f"{seconds:g} s, and {_ranks(missing)} did not; check that every process was started with this address "
                "and port"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return ""


def _info(placement: Placement) -> dict[str, Any]:
    return {
        "rank": placement.rank,
        "world": placement.world_size,
        "description": placement.describe("WORLD_SIZE"),
    }


def _conflict(placement: Placement, info: dict[str, Any], seen: set[int]) -> str:
    if info["world"] != placement.world_size:
        return (
            f"rank 0 has {placement.describe('WORLD_SIZE')}, but rank {info['rank']} has {info['description']}; "
            f"all processes that connect to {_master(placement)} must have the same world size"
        )
    if info["rank"] in seen:
        return (
            f"rank {info['rank']} connected twice to {_master(placement)}; each process requires a unique rank "
            f"({placement.sources.get('RANK', 'RANK')}), and each job requires a unique port"
        )
    return ""


def _wait_for_readers(store: Store) -> None:
    """Wait until the other ranks have read the error, because the store is lost when rank 0 exits."""
    deadline = time.monotonic() + 5
    with contextlib.suppress(dist.DistError):
        while store.add("read", 0) + 1 < store.add("arrived", 0) and time.monotonic() < deadline:
            time.sleep(0.05)


def _master(placement: Placement) -> str:
    return f"{placement.describe('MASTER_ADDR')}, {placement.describe('MASTER_PORT')}"


def _ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers, for example as `rank 3` or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    names = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {names}" if names.isdecimal() else f"ranks {names}"
