"""Run one command in several processes on this machine with torch's elastic launcher."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.configure import command_args
from slipstream.cores import cores
from slipstream.errors import ConfigError, DistributedError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# Environment variable that contains the path of the folder shared by the processes of one launch.
_FOLDER = "SLIPSTREAM_LAUNCH"
# File in that folder that contains the result of `_progress` at launch.
_PROGRESS = "progress"
# File in that folder that exists if a process has stopped after a signal without losing any state.
_PREEMPTED = "preempted"


def needs_launch(args: argparse.Namespace) -> bool:
    """Return whether the command must be launched in separate processes.

    Raises:
        ConfigError: `--max-restarts` is set without `--nproc`.
    """
    if args.nproc is None and args.max_restarts:
        raise ConfigError(
            "`--max-restarts` requires `--nproc`; other launchers have their own restart option"
        )
    return args.nproc is not None


def launch(args: argparse.Namespace, work_dir: str) -> int:
    """Run the command in `args.nproc` processes. Return the exit status of the first process that failed, or 0.

    If torchrun's PET_NNODES variable is greater than 1, the same command must run on PET_NNODES machines with different
    values of PET_NODE_RANK. PET_MASTER_ADDR is the address of the machine with PET_NODE_RANK=0, which runs rank 0.

    The processes inherit stdout and stderr. All of them receive Ctrl-C and SIGTERM. If one process fails, the others
    are terminated.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from slipstream.preemption import EXIT_STATUS

    config = _launch_config(_count(args.nproc), args.max_restarts)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // config.nproc_per_node)))
    # The failed process or `_report` reports failures.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    # The launcher replaces $local_rank in the arguments, so each $ must be escaped.
    argv = [word.replace("$", "$$") for word in command_args(args, launcher="pytorch")]
    with _shared_folder(work_dir) as folder:
        config.logs_specs = DefaultLogsSpecs(folder)
        try:
            elastic_launch(config, sys.executable)("-m", "slipstream", *argv)
        except ChildFailedError as error:
            printed = (Path(folder) / f"failed-{args.max_restarts}").is_file()
            return _report(error.failures, printed)
        except SignalException as stopped:
            if (Path(folder) / _PREEMPTED).is_file():
                return EXIT_STATUS  # rank 0 has logged how to resume
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            print(f"stopped by {stopped.sigval.name}; all written files are complete", file=sys.stderr)
            return 128 + stopped.sigval
    return 0


def _launch_config(count: int, max_restarts: int) -> LaunchConfig:
    """Return torchrun's configuration; with PET_NNODES, for several machines, otherwise for this one."""
    from torch.distributed.launcher.api import LaunchConfig

    from slipstream.dist.placement import DEFAULT_PORT, read_int, read_str

    common: dict[str, Any] = {"nproc_per_node": count, "max_restarts": max_restarts, "run_id": "slipstream"}
    if os.environ.get("PET_NNODES", "1") == "1":
        # Port 0 selects a free port, and the local address avoids host name resolution.
        address: dict[str, Any] = {"rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
        return LaunchConfig(min_nodes=1, max_nodes=1, rdzv_backend="c10d", **address, **common)
    nodes, rank = (read_int(os.environ, name, "pytorch") for name in ("PET_NNODES", "PET_NODE_RANK"))
    if rank >= nodes:
        raise DistributedError(f"PET_NODE_RANK={rank} must be less than PET_NNODES={nodes}; ranks start at 0")
    port = os.environ.get("PET_MASTER_PORT") or DEFAULT_PORT
    endpoint = f"{read_str(os.environ, 'PET_MASTER_ADDR', 'pytorch')}:{port}"
    configs = {"rank": rank}
    return LaunchConfig(
        min_nodes=nodes, max_nodes=nodes, rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_configs=configs,
        **common,
    )  # fmt: skip


@contextmanager
def _shared_folder(work_dir: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        (Path(folder) / _PROGRESS).write_text(_progress(work_dir))
        os.environ[_FOLDER] = folder
        try:
            yield folder
        finally:
            del os.environ[_FOLDER]


def _count(text: str) -> int:
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(text)
    except ValueError as error:
        raise ConfigError(f"`--nproc` must be a number, gpu, auto or cpu, not '{text}': {error}") from None
    return count


def _report(failures: Mapping[int, Any], printed: bool) -> int:
    """Return the exit status of the first process that failed, and print an error, unless that process printed one."""
    # The launcher terminates the remaining processes with SIGTERM after a failure.
    rank, first = min(
        failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp, item[1].exitcode > 0),
    )
    status = int(first.exitcode)
    if status < 0:
        name = signal.Signals(-status).name
        hint = ", possibly because the machine ran out of memory" if name == "SIGKILL" else ""
        print(f"slipstream: error: rank {rank} (pid {first.pid}) was killed by {name}{hint}", file=sys.stderr)
        return 128 - status
    if not printed or status not in (1, 2):  # exit statuses of `main`
        print(f"slipstream: error: rank {rank} exited with status {status}", file=sys.stderr)
    return status


# ---- in each launched process ----------------------------------------------------------------------------------


def in_launch() -> bool:
    """Return whether `launch` started this process."""
    return _FOLDER in os.environ


def enter_process() -> None:
    """On Linux, ensure that this process does not outlive its launcher. Report a restart on local rank 0.

    This has no effect if `launch` did not start this process.
    """
    if not in_launch():
        return
    if sys.platform == "linux":
        import ctypes

        # Each process has its own session and receives no signal when the terminal closes or the launcher exits.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if (attempt := _attempt()) and os.environ["LOCAL_RANK"] == "0":
        print(
            f"slipstream: a process failed; restart {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}",
            file=sys.stderr,
        )


def announce(text: str) -> None:
    """Report the failure of this process to the other processes of the run, if any."""
    if "slipstream.dist" in sys.modules:  # otherwise no process group exists
        from slipstream.dist import announce_failure

        announce_failure(text)


def announce_preemption(error: SystemExit) -> None:
    """Report to the launcher, if any, that this process stopped after a signal without losing any state."""
    if in_launch():
        from slipstream.preemption import Preempted

        if isinstance(error, Preempted):
            (Path(os.environ[_FOLDER]) / _PREEMPTED).touch()


def is_first_failure() -> bool:
    """Return whether this process is the first process in its launch to fail. Only that process prints its error."""
    if not in_launch():
        return True
    try:
        (Path(os.environ[_FOLDER]) / f"failed-{_attempt()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def restarted_with_progress(work_dir: str) -> bool:
    """Return whether the launcher restarted this process after a failure and this launch wrote a checkpoint.

    Checkpoints from earlier runs in the work_dir are ignored.
    """
    if not _attempt():
        return False
    initial = (Path(os.environ[_FOLDER]) / _PROGRESS).read_text() if in_launch() else ""
    return _progress(work_dir) != initial


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _progress(work_dir: str) -> str:
    """Return a string that changes whenever a checkpoint is written."""
    pointer = Path(work_dir) / "last_checkpoint"
    return str(pointer.stat().st_mtime_ns) if pointer.is_file() else ""


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt in the `with` block on SIGTERM, as on Ctrl-C.

    Processes started in the block are then terminated, and partial results are kept.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
