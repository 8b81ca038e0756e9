"""A Ray cluster on the two machines. Each is configured with eight CPUs and two GPUs, regardless of its hardware."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from cluster.machines import ADDRESSES, Machine, Run

ADDRESS = f"{ADDRESSES['n1']}:6379"


@contextmanager
def ray_cluster(
    machines: Mapping[str, Machine], folder: Path, **environ: str
) -> Iterator[dict[str, Machine]]:
    """Start the cluster, and stop it at the end of the block. Yield machines whose commands connect to it.

    Ray's processes write their output to `folder`. Ray's sockets are in a separate folder, because a socket path can
    have at most 107 characters.
    """
    with ExitStack() as stack:
        sockets = tempfile.mkdtemp(prefix="ray")
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        environ |= {"RAY_TMPDIR": sockets, "RAY_ADDRESS": ADDRESS}
        found = {name: replace(machine, environ=environ) for name, machine in machines.items()}
        for name, machine in found.items():
            head = f"--head --port=6379 --include-dashboard=false --temp-dir={sockets}"
            options = head if name == "n1" else f"--address={ADDRESS}"
            _wait(stack.enter_context(machine.running(_START.format(ADDRESSES[name], options), folder)))
        yield found


_START = (
    "ray start --block --disable-usage-stats --num-cpus=8 --num-gpus=2 --object-store-memory=80000000 "
    "--node-ip-address={} {}"
)


def _wait(run: Run, within: float = 100) -> None:
    end = time.monotonic() + within
    while "Ray runtime started" not in run.output:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < end, run.output
        time.sleep(0.1)
