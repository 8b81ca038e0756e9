"""Wait for batches: warn if no batch arrives, explain worker process errors, and stop the workers."""

from __future__ import annotations

import errno
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from slipstream.dataset.loading.generators import hash_numbers
from slipstream.dataset.loading.worker_init import signals_blocked
from slipstream.dist import get_rank
from slipstream.errors import DataLoaderError

__all__ = ["STALL_WARNING", "Loading", "explain_worker_errors"]

STALL_WARNING = 60.0
"""Default number of seconds without a batch after which a run logs a warning."""

_SHM = Path("/dev/shm")
_TIMED_OUT = r"DataLoader timed out after (\S+) seconds"
_KILLED = r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (is killed by signal: \w+|exited unexpectedly)"
_SHARED_MEMORY = r"dataloader's workers are out of shared memory|unable to [^\n]*</torch_"
_OPEN_FILES = r"Communication with the workers is no longer possible|received \d+ items of ancdata"


class Loading:
    """One pass over a loader.

    A thread warns if no batch arrives for `stall_warning` seconds, and again each time the waiting time has doubled.
    For a batch that arrives in time, the overhead is one clock read and a few assignments.

    Args:
        loader: the loader. Its worker processes start immediately.
        name: name of the loader's option in the configuration (such as `train_dataloader`).
        warn: function that logs a warning; called from the thread.
        numbers: non-negative integers, such as (seed, epoch). The workers' seed is computed from these, the initial
            seed of the loader's generator, and the rank, because a resumed run cannot restore the generator's state.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        warn: Callable[[str], None],
        numbers: Sequence[int] = (0, 0),
    ) -> None:
        self.loader, self.name, self.warn = loader, name, warn
        self.seconds: float = getattr(loader, "stall_warning", STALL_WARNING)
        try:
            with signals_blocked(loader), _seeded(loader, numbers):
                self._iterator: Any = iter(loader)
        except OSError as error:  # the workers' queues and locks are also in shared memory
            if error.errno != errno.ENOSPC:
                raise
            raise DataLoaderError(_out_of_shared_memory(name)) from error
        self._since: float | None = None
        self._count = 0
        self._stop = threading.Event()
        self._waiting_thread = threading.get_ident()

    def __iter__(self) -> Iterator[Any]:
        if self.seconds:
            self._waiting_thread = threading.get_ident()
            threading.Thread(target=self._watch, name="slipstream-stall-warning", daemon=True).start()
        try:
            while True:
                self._since = time.monotonic()
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    return
                except (ConnectionError, EOFError) as error:
                    self._check_connection(error)
                    raise
                self._since = None
                self._count += 1
                yield batch
        finally:
            self._since = None
            self._stop.set()

    def close(self) -> None:
        """Stop the thread and all worker processes that are not persistent. The pass cannot continue afterwards."""
        self._stop.set()
        if not getattr(self.loader, "persistent_workers", False):
            stop_workers(self._iterator)

    def _check_connection(self, error: Exception) -> None:
        """Raise a DataLoaderError if the error was raised while this process was receiving a batch from a worker."""
        in_worker = str(error).startswith("Caught ")  # torch's prefix for an error raised in a worker
        if hasattr(self._iterator, "_workers") and not in_worker:
            raise DataLoaderError(
                f"{self.name}: a worker process died while sending a batch; set num_workers=0 to see the error in the "
                "training process"
            ) from error

    def _watch(self) -> None:
        threshold = self.seconds
        while not self._stop.wait(min(self.seconds / 4, 5)):
            since = self._since
            waited = 0.0 if since is None else time.monotonic() - since
            if waited < self.seconds:
                threshold = self.seconds
            elif waited >= threshold:
                threshold = 2 * waited
                self.warn(self._warning(waited))

    def _warning(self, waited: float) -> str:
        plural = "es" * (self._count != 1)
        text = f"{self.name}: no batch for {waited:.3g} s, after {self._count} batch{plural} in this pass. "
        workers = getattr(self._iterator, "_workers", None)
        if workers is None:
            frame = sys._current_frames().get(self._waiting_thread)
            where = traceback.extract_stack(frame)[-1] if frame else None
            place = (
                f"The process is executing {where.name} ({where.filename}:{where.lineno}). " if where else ""
            )
            return text + (
                f"{place}The run continues when the dataset returns a sample. To end the run with an error instead, "
                f"set {self.name}.timeout=SECONDS and num_workers to at least 1"
            )
        pids = ", ".join(str(worker.pid) for worker in workers)
        return text + (
            f"A worker process (pid {pids}) is slow or has hung; `py-spy dump --pid PID` prints its current stack"
            f"{_scarce_shared_memory()}. To end the run with an error instead, set {self.name}.timeout=SECONDS"
        )


@contextmanager
def _seeded(loader: DataLoader[Any], numbers: Sequence[int]) -> Iterator[None]:
    """Replace the loader's generator, from which the workers' seed is drawn, within the context.

    The new generator's seed depends on `numbers`, the initial seed of the loader's generator, and the rank.
    """
    generator = loader.generator
    own_seed = 0 if generator is None else generator.initial_seed()
    loader.generator = torch.Generator().manual_seed(hash_numbers((*numbers, own_seed, get_rank())))
    try:
        yield
    finally:
        loader.generator = generator


def stop_workers(iterator: Any) -> None:
    """Stop the worker processes of an iterator over a loader, if it has any."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


@contextmanager
def explain_worker_errors(name: str) -> Iterator[None]:
    """Replace torch's errors about worker processes with errors that name the loader's option and suggest a remedy.

    When a worker dies, torch raises an error in the training process, at whatever line that process is executing.

    Raises:
        DataLoaderError: a worker died or timed out, or shared memory or file descriptors were exhausted.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        explained = None if isinstance(error, DataLoaderError) else _explain(str(error), name)
        if explained is None:
            raise
        raise DataLoaderError(explained) from error


def _explain(text: str, name: str) -> str | None:
    if timed_out := re.search(_TIMED_OUT, text):
        return (
            f"no batch arrived within {timed_out[1]} s ({name}.timeout): a worker process is slow or has hung"
            f"{_scarce_shared_memory()}. Set num_workers=0 to find the slow sample, or increase the timeout"
        )
    if re.search(_SHARED_MEMORY, text):
        return _out_of_shared_memory(name)
    if re.search(_OPEN_FILES, text):
        return (
            f"{name}: the worker processes have too many open files, because each tensor in a batch uses a file "
            "descriptor; raise the limit (ulimit -n 65536), or call "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    if died := re.search(_KILLED, text):
        cause = "it may have printed an error, or the system may have run out of memory"
        if "Killed" in died[1]:
            cause = "the system probably ran out of memory"
        return (
            f"{name}: {died[0]}; {cause}{_scarce_shared_memory()}. Lower num_workers, or set num_workers=0 to see the "
            "error in the training process"
        )
    return None


def _out_of_shared_memory(name: str) -> str:
    return (
        f"{name}: the worker processes have no shared memory left for their batches{_shared_memory()}; increase "
        "its size (docker run --shm-size=8g, or --ipc=host); lower num_workers, prefetch_factor or batch_size; or set "
        "num_workers=0"
    )


def _shared_memory() -> str:
    if not _SHM.is_dir():
        return ""
    usage = shutil.disk_usage(_SHM)
    return f" ({_SHM} has {usage.total / 2**20:.4g} MiB, of which {usage.free / 2**20:.4g} MiB is free)"


def _scarce_shared_memory() -> str:
    """Return a hint if shared memory is nearly full or has only a container's default size; otherwise, return ''."""
    if not _SHM.is_dir():
        return ""
    usage = shutil.disk_usage(_SHM)
    scarce = usage.free < 2**24 or usage.total <= 2**26
    return f"; a batch may not fit in shared memory{_shared_memory()}" if scarce else ""
