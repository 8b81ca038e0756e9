"""Bring all processes of a job together, or say who is missing and which variable is to blame."""

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


def open_store(here: Placement, seconds: float) -> Store:
    """Return a store for this job alone, served by rank 0 or torchrun, once every rank has come to it.

    Args:
        here: this process's place; rank 0 (or torchrun) listens at its `master_port`.
        seconds: how long to wait for rank 0, and then for the other ranks.

    Raises:
        DistributedError: on every rank that came: a rank is missing, came twice, has another world size, rank 0
            cannot be reached or cannot listen; the error names the variables and their values.
    """
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = here.rank == 0 and not elastic
    store = _serve(here, seconds) if serves else _connect(here, seconds)
    try:
        # torchrun keeps its store when it starts the processes again, so there every rank 0 is a new one.
        leads = here.rank == 0 and (elastic or store.add("rank 0", 1) == 1)
        return _gather(here, store, seconds) if leads else _follow(here, store, seconds)
    except dist.DistError as error:
        raise DistributedError(
            f"rank 0 gave no answer at {_master(here)} while the ranks gathered: it ended, see its error, or never came"
        ) from error


def _serve(here: Placement, seconds: float) -> Store:
    try:
        return _store(here, seconds, serves=True)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise DistributedError(
                f"rank 0 cannot listen: {here.named('MASTER_PORT')} is in use on this machine by another job or "
                "another rank 0; export another MASTER_PORT, the same for every process"
            ) from error
        raise DistributedError(
            f"rank 0 runs on {socket.gethostname()!r} but found nobody, not even itself, at {_master(here)} within "
            f"{seconds:g} s: MASTER_ADDR must be the machine of rank 0"
        ) from error


def _connect(here: Placement, seconds: float) -> Store:
    try:
        socket.getaddrinfo(here.master_addr, int(here.master_port))
    except OSError as error:
        raise DistributedError(
            f"{here.named('MASTER_ADDR')} cannot be resolved on {socket.gethostname()!r}: {error}"
        ) from error
    # A program that is no store may take the connection and never answer, for which torch has no time limit.
    answer: queue.SimpleQueue[Store | dist.DistError] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_attempt(here, seconds)), daemon=True).start()
    try:
        store = answer.get(timeout=3 * seconds + 10)
    except queue.Empty:
        raise DistributedError(
            f"{_master(here)} is taken by a program that does not answer: export another MASTER_PORT, the same for "
            "every process"
        ) from None
    if isinstance(store, dist.DistError):
        raise DistributedError(
            f"rank {here.rank} on {socket.gethostname()!r} found no rank 0 at {_master(here)} within {seconds:g} s: "
            "was rank 0 started there, with the same MASTER_PORT, and does no firewall stand between?"
        ) from store
    return store


def _attempt(here: Placement, seconds: float) -> Store | dist.DistError:
    try:
        return _store(here, seconds)
    except dist.DistError as error:
        return error


def _store(here: Placement, seconds: float, serves: bool = False) -> Store:
    return TCPStore(
        here.master_addr,
        int(here.master_port),
        here.world_size,
        is_master=serves,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def _gather(here: Placement, store: Store, seconds: float) -> Store:
    """Rank 0 names a session, counts who comes to it and gives its verdict, empty if all is well.

    Whatever an earlier start of the processes left in torchrun's store is outside of the session.
    """
    session = secrets.token_hex(8)
    inside = PrefixStore(session, store)
    inside.add("came", 1)
    inside.set("card/1", json.dumps(_card(here)))
    verdict = _judge(here, store, inside, session, seconds)
    inside.set("verdict", verdict)
    if verdict:
        _wait_for_readers(inside)
        raise DistributedError(verdict)
    return inside


def _follow(here: Placement, store: Store, seconds: float) -> Store:
    """Ask rank 0 for its session, come to it and wait for the verdict."""
    # Rank 0 may come as much later than this rank as it waits itself.
    patience = timedelta(seconds=2 * seconds + 10)
    answer = f"session/{store.add('hello', 1)}"
    store.wait([answer], patience)
    inside = PrefixStore(store.get(answer).decode(), store)
    inside.set(f"card/{inside.add('places', 1) + 1}", json.dumps(_card(here)))
    inside.add("came", 1)
    inside.wait(["verdict"], patience)
    verdict = inside.get("verdict").decode()
    inside.add("read", 1)
    if verdict:
        raise DistributedError(verdict)
    return inside


def _judge(here: Placement, store: Store, inside: Store, session: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    pause = 0.001
    seen: set[int] = set()
    answered = read = 0
    while len(seen) < here.world_size:
        hellos, came = store.add("hello", 0), inside.add("came", 0)
        for place in range(answered + 1, hellos + 1):
            store.set(f"session/{place}", session)
        for place in range(read + 1, came + 1):
            card = json.loads(inside.get(f"card/{place}"))
            if fault := _fault(here, card, seen):
                return fault
            seen.add(card["rank"])
        answered, read = hellos, came
        if len(seen) < here.world_size and time.monotonic() > deadline:
            missing = set(range(here.world_size)) - seen
            return (
                f"{here.named('WORLD_SIZE')}, but after {seconds:g} s only {_ranks(seen)} came to {_master(here)}; "
                f"{_ranks(missing)} did not: was every process started, with this address and port?"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return ""


def _card(here: Placement) -> dict[str, Any]:
    return {"rank": here.rank, "world": here.world_size, "said": here.named("WORLD_SIZE")}


def _fault(here: Placement, card: dict[str, Any], seen: set[int]) -> str:
    if card["world"] != here.world_size:
        return (
            f"rank 0 has {here.named('WORLD_SIZE')}, but rank {card['rank']} has {card['said']}: "
            f"every process that comes to {_master(here)} must have the same"
        )
    if card["rank"] in seen:
        return (
            f"rank {card['rank']} came twice to {_master(here)}: each process needs a rank of its own "
            f"({here.sources.get('RANK', 'RANK')}), and each job a port of its own"
        )
    return ""


def _wait_for_readers(store: Store) -> None:
    """Let the others read the verdict before the end of rank 0 takes the store from them."""
    deadline = time.monotonic() + 5
    with contextlib.suppress(dist.DistError):
        while store.add("read", 0) + 1 < store.add("came", 0) and time.monotonic() < deadline:
            time.sleep(0.05)


def _master(here: Placement) -> str:
    return f"{here.named('MASTER_ADDR')}, {here.named('MASTER_PORT')}"


def _ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    names = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {names}" if names.isdecimal() else f"ranks {names}"
