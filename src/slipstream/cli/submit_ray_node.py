"""The actor for `slipstream submit --to ray`, which runs `slipstream train` on one node of a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.errors import DistributedError

__all__ = ["Node", "Process"]


class Process(NamedTuple):
    """The process to start on a node."""

    arguments: Sequence[str]
    """Arguments after `slipstream`."""
    environ: Mapping[str, str]
    """Variables to add to the actor's environment, which already contains Ray's GPU selection."""
    folder: str
    """Working directory."""


class Node:
    """Starts the launcher (`slipstream train --nproc N`) on a node, forwards its output, and stops it on request.

    Ray must be able to call `stop` while `train` is running (`max_concurrency=2`).
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def endpoint(self) -> tuple[str, int]:
        """Return this node's address in the cluster and a free port."""
        import ray

        address: str = ray.util.get_node_ip_address()
        with socket.socket() as sock:
            sock.bind((address, 0))
            return address, sock.getsockname()[1]

    def train(self, process: Process) -> Iterator[str | int]:
        """Run the process. Yield each line of its output, then its exit status.

        Raises:
            DistributedError: the working directory does not exist on this node.
        """
        if not Path(process.folder).is_dir():
            raise DistributedError(
                f"the folder {process.folder} does not exist on this node; submit from a folder shared by all nodes"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *process.arguments],
            env={**os.environ, **process.environ},
            cwd=process.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        if self._stopped:
            self._process.terminate()
        assert self._process.stdout is not None
        # Ray calls `send` on this generator; `yield from` would forward the call to the file object.
        for line in self._process.stdout:  # noqa: UP028
            yield line
        status = self._process.wait()
        yield 128 - status if status < 0 else status

    def stop(self) -> None:
        """Send SIGTERM to the process, now or as soon as it starts. The training processes then save their state."""
        self._stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
