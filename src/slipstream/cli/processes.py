"""Several processes of one command on this machine, under torch's elastic launcher."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.configure import command_words
from slipstream.cores import cores
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = [
    "announce",
    "enter_process",
    "in_launch",
    "launch",
    "restarted_with_progress",
    "speaking",
    "wants_processes",
]

# Names, to the processes of one launch, a folder that they share.
_FOLDER = "SLIPSTREAM_LAUNCH"
# The file in it that says how far the work_dir had come when the launch began.
_PROGRESS = "progress"


def wants_processes(args: argparse.Namespace) -> bool:
    """Say whether the command shall be launched in processes of its own.

    Raises:
        ConfigError: `--max-restarts` without them.
    """
    if args.nproc is None and args.max_restarts:
        raise ConfigError("--max-restarts needs --nproc: it is who starts processes that restarts them")
    return args.nproc is not None


def launch(args: argparse.Namespace, work_dir: str) -> int:
    """Run the command in `args.nproc` processes, and return the exit status of the first that failed, or 0.

    Their output goes where this process's goes; Ctrl-C and SIGTERM reach all of them, and a failure of one ends
    the others.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    config = _launch_config(_count(args.nproc), args.max_restarts)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // config.nproc_per_node)))
    _silence_launcher()
    # The launcher replaces $local_rank in the words.
    words = [word.replace("$", "$$") for word in command_words(args, launcher="pytorch")]
    with _shared_folder(work_dir) as folder:
        config.logs_specs = DefaultLogsSpecs(folder)
        try:
            elastic_launch(config, sys.executable)("-m", "slipstream", *words)
        except ChildFailedError as error:
            speaker = Path(folder) / f"failed-{args.max_restarts}"
            return _report(error.failures, said=speaker.is_file() and bool(speaker.read_text()))
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            print(f"stopped by {stopped.sigval.name}; what was written so far is complete", file=sys.stderr)
            return 128 + stopped.sigval
    return 0


def _launch_config(count: int, max_restarts: int) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        max_restarts=max_restarts,
        run_id="slipstream",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port
        local_addr="127.0.0.1",  # whatever the machine's name resolves to
    )


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
        raise ConfigError(f"--nproc is a number, gpu, auto or cpu, not '{text}': {error}") from None
    if count < 1:
        raise ConfigError(f"--nproc must be 1 or more, not {text}")
    return count


def _silence_launcher() -> None:
    """The launcher calls each of its steps a warning; what a user needs is said by the processes and here."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def _report(failures: Mapping[int, Any], said: bool) -> int:
    """Return the exit status of the first process that failed, and say so if no process could say why."""
    # Those that SIGTERM ended were ended by the launcher, since another had failed.
    rank, first = min(
        failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp, item[1].exitcode > 0),
    )
    status = int(first.exitcode)
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; did the machine run out of memory?" if name == "SIGKILL" else ""
        print(f"slipstream: error: rank {rank} (pid {first.pid}) was ended by {name}{hint}", file=sys.stderr)
        return 128 - status
    if not said or status not in (1, 2):  # those of `main`
        print(f"slipstream: error: rank {rank} ended with exit status {status}", file=sys.stderr)
    return status


# ---- in each of the processes ----------------------------------------------------------------------------------


def in_launch() -> bool:
    """Say whether `launch` started this process."""
    return _FOLDER in os.environ


def enter_process() -> None:
    """Bind this process to the one that launched it, if one did: it must not outlive it."""
    if not in_launch():
        return
    if sys.platform == "linux":
        import ctypes

        # Each process has a session of its own: neither a closed terminal nor the launcher's death would reach it.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if (attempt := _attempt()) and os.environ["LOCAL_RANK"] == "0":
        print(
            f"slipstream: a process failed; restart {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}",
            file=sys.stderr,
        )


def announce(text: str) -> None:
    """Tell the other processes of this run, if there are any, that this one failed."""
    if "slipstream.dist" in sys.modules:  # no other knows of this one before
        from slipstream.dist import announce_failure

        announce_failure(text)


@contextmanager
def speaking() -> Iterator[bool]:
    """Give whether this process's failure is the first of its launch: the only one to be shown, in the block."""
    if not in_launch():
        yield True
        return
    speaker = Path(os.environ[_FOLDER]) / f"failed-{_attempt()}"
    try:
        speaker.touch(exist_ok=False)
    except FileExistsError:
        yield False
    else:
        yield True
        speaker.write_text("said")


def restarted_with_progress(work_dir: str) -> bool:
    """Say whether the launcher restarted this process after a failure, and a checkpoint was written before.

    A checkpoint that an earlier run left in the work_dir is none of this one.
    """
    if not _attempt():
        return False
    before = (Path(os.environ[_FOLDER]) / _PROGRESS).read_text() if in_launch() else ""
    return _progress(work_dir) != before


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _progress(work_dir: str) -> str:
    """Return what changes whenever a checkpoint is written."""
    pointer = Path(work_dir) / "last_checkpoint"
    return str(pointer.stat().st_mtime_ns) if pointer.is_file() else ""
