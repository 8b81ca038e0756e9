"""`slipstream submit --to ray`: train on a running Ray cluster, and wait until training ends."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.cli.configure import command_args, configure
from slipstream.cli.submit_checks import tasks_per_node
from slipstream.cli.submit_ray_node import Node, Process
from slipstream.errors import ConfigError, DistributedError
from slipstream.extras import extra
from slipstream.preemption import EXIT_STATUS

__all__ = ["run"]

_POLL_INTERVAL = 0.2
"""Seconds between checks for a signal."""
_MESSAGE_DELAY = 5.0
"""Seconds to wait for the nodes before a message reports what the job requires."""
_TIMEOUT = 10.0
"""Seconds to wait for a connection to the cluster."""


def run(args: argparse.Namespace) -> int:
    """Train on the cluster, print the output, and return the exit status of the first node that failed, or 0."""
    cfg = configure(args)
    work_dir = Path(cfg.work_dir).absolute()
    address = _address(args)
    with extra("ray"):
        import ray
    _connect(ray, address)
    try:
        with _signals() as received:
            nodes = _start_nodes(ray, args, received)
            if nodes is not None:
                status = _follow(ray, _start_training(ray, args, work_dir, nodes), received)
                if not received or status in (0, EXIT_STATUS):
                    return status
    finally:
        ray.shutdown()  # terminates the actors
    if received[0] == signal.SIGINT:
        raise KeyboardInterrupt
    print(f"stopped by {signal.Signals(received[0]).name}; all written files are complete", file=sys.stderr)
    return 128 + received[0]


def _address(args: argparse.Namespace) -> str:
    """Return the cluster address: `--address`, RAY_ADDRESS, or `auto` for the cluster on this machine."""
    address = args.address or os.environ.get("RAY_ADDRESS") or "auto"
    _, _, port = address.rpartition(":")
    if address != "auto" and ("/" in address or not port.isdecimal()):
        source = "--address" if args.address else "RAY_ADDRESS"
        raise ConfigError(
            f"`{source}`: '{address}' is not HOST:PORT; pass the address that `ray start --head` prints, and run this "
            "command on a machine in the cluster"
        )
    return str(address)


def _connect(ray: Any, address: str) -> None:
    try:
        if address != "auto":  # without this check, Ray would try to connect for several minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        place = "on this machine" if address == "auto" else f"at {address}"
        raise DistributedError(
            f"cannot connect to a Ray cluster {place} ({_reason(error)}); start one with `ray start --head`, or pass "
            "the address of a running cluster's head node with --address HOST:PORT"
        ) from None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that this process receives. The second signal raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [signum for signum in numbers if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handle) for signum in handled}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@dataclass(frozen=True)
class _NodeActor:
    """The actor on a node, and the node's address."""

    actor: Any
    address: str
    port: int


def _resources(args: argparse.Namespace) -> dict[str, float]:
    """Return the resources that a node must have, keyed by Ray's resource names."""
    tasks = tasks_per_node(args)
    resources: dict[str, float] = {"CPU": tasks * (args.cpus_per_task or 1)}
    if args.gpus_per_node:
        resources["GPU"] = tasks
        kind, _, _ = args.gpus_per_node.rpartition(":")
        if kind:
            # A node with this GPU type has one unit of this resource. Like Ray's `accelerator_type` option, request a
            # small fraction of it.
            resources[f"accelerator_type:{kind}"] = 0.001
    return resources


def _start_nodes(ray: Any, args: argparse.Namespace, received: Sequence[int]) -> list[_NodeActor] | None:
    """Wait for the nodes and start an actor on each node. Return None if a signal arrives first."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    required = _resources(args)
    group = placement_group([required] * args.nodes, strategy="STRICT_SPREAD", name=args.job_name or "")
    begin, reported = time.monotonic(), False
    while not group.wait(_POLL_INTERVAL):
        if received:
            return None
        if not reported and time.monotonic() - begin > _MESSAGE_DELAY:
            reported = True
            print(_waiting_message(required, args.nodes, ray.nodes()), file=sys.stderr, flush=True)
    remote = ray.remote(num_cpus=required["CPU"], num_gpus=required.get("GPU", 0), max_concurrency=2)(Node)
    actors = [
        remote.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in range(args.nodes)
    ]
    try:
        return [_NodeActor(actor, *ray.get(actor.endpoint.remote())) for actor in actors]
    except ray.exceptions.RayError as error:
        raise DistributedError(
            f"an actor failed to start ({_reason(error)}); Slipstream must be installed on all nodes of the cluster"
        ) from None


def _waiting_message(required: dict[str, float], count: int, nodes: Sequence[dict[str, Any]]) -> str:
    def text(resources: dict[str, float]) -> str:
        return ", ".join(f"{resources.get(name, 0):g} {name}" for name in required)

    available = "; ".join(text(node["Resources"]) for node in nodes if node["Alive"])
    return f"slipstream: waiting for {count} x ({text(required)}); total resources of each node: {available}"


def _start_training(
    ray: Any, args: argparse.Namespace, work_dir: Path, nodes: Sequence[_NodeActor]
) -> dict[Any, _NodeActor]:
    """Start the launcher on each node. Return a dict that maps each output stream to its node."""
    argv = command_args(args, command="train", work_dir=str(work_dir), resume=True)
    argv.append(f"--nproc={tasks_per_node(args)}")
    environ = {"OMP_NUM_THREADS": str(args.cpus_per_task or 1)}
    if not args.gpus_per_node:
        environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray may have assigned this node's GPUs to other programs
    environ |= dict(args.env)
    if len(nodes) > 1:
        environ |= {
            "PET_NNODES": str(len(nodes)),
            "PET_MASTER_ADDR": nodes[0].address,
            "PET_MASTER_PORT": str(nodes[0].port),
        }
    streams = {}
    for rank, node in enumerate(nodes):
        process = Process(argv, {**environ, "PET_NODE_RANK": str(rank)}, str(Path.cwd()))
        streams[node.actor.train.options(num_returns="streaming").remote(process)] = node
    return streams


def _follow(ray: Any, streams: dict[Any, _NodeActor], received: Sequence[int]) -> int:
    """Print the output until all nodes have finished. Return the status of the first node that failed, or 0.

    The other nodes are stopped when a node fails, and all nodes are stopped after a signal.
    """
    total, first_failure, stopped = len(streams), 0, False
    while streams:
        ready, _ = ray.wait(list(streams), timeout=_POLL_INTERVAL)
        for stream in ready:
            item = _next(ray, stream)
            if isinstance(item, str):
                print(item, end="", flush=True)
                continue
            node = streams.pop(stream)
            status = item if isinstance(item, int) else 1
            if status and not first_failure:
                first_failure = status
                if status != EXIT_STATUS and not received:
                    _report(node, total, item)
        # If one node has saved its state, the others do so too, and need not be stopped.
        if not stopped and (received or first_failure not in (0, EXIT_STATUS)):
            stopped = True
            for node in streams.values():
                node.actor.stop.remote()
    return first_failure


def _next(ray: Any, stream: Any) -> str | int | Exception:
    """Return the next line of a node's output, its exit status, or the error that occurred instead."""
    try:
        item: str | int = ray.get(next(stream))
    except (ray.exceptions.RayError, DistributedError) as error:
        return error
    return item


def _report(node: _NodeActor, total: int, result: int | Exception) -> None:
    message = (
        f"exited with status {result}; see the messages above"
        if isinstance(result, int)
        else f"failed: {_reason(result)}"
    )
    place = f"on node {node.address}" + (f" (one of {total} nodes)" if total > 1 else "")
    print(f"slipstream: error: the training processes {place} {message}", file=sys.stderr)


def _reason(error: Exception) -> str:
    """Return the last line of an error message. The other lines of Ray's errors contain a traceback or ids."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
