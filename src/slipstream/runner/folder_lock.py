"""Lock an output folder, so that two runs never write to it at the same time or overwrite each other's checkpoints."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from slipstream.checkpoint import remove_partial_checkpoints
from slipstream.dist import broadcast_object_list, is_main_process
from slipstream.errors import ConfigError
from slipstream.files import remove_temporary_files

# The first line describes the process that holds the lock. The rest is the path of the run's work_dir relative to the
# folder. This path remains valid if both are moved together.
LOCK_FILE = ".lock"
# Seconds to wait for the lock, because the data loader workers of a killed run hold it until they end.
_TIMEOUT = 5.0


class FolderLock:
    """An exclusive lock on each output folder, held from the call to `lock` until the call to `release`.

    The operating system releases the lock when the process ends, even if it is killed. On Windows, `lock` has no
    effect; on file systems that do not support locks, it calls `warn` and does not lock the folder. The lock file also
    records the run's work_dir, so that runs with a different work_dir cannot use the folder.

    Args:
        work_dir: output folder of the run.
        warn: called with a message if the file system does not support locks.
    """

    def __init__(self, work_dir: str | Path, warn: Callable[[str], None]) -> None:
        self._work_dir = Path(work_dir).resolve()
        self._files: dict[Path, IO[bytes]] = {}
        self._warn = warn

    def lock(self, folder: Path, key: str) -> None:
        """Lock `folder` and remove the temporary files of runs that were killed. All ranks must call this method.

        Args:
            folder: output folder; rank 0 creates and locks it.
            key: configuration key that sets this folder, used in error messages.

        Raises:
            ConfigError: the folder is in use by another run, belongs to a run with a different work_dir, or cannot be
                written to. The error is raised on every rank.
        """
        folder = folder.resolve()
        problem: list[str | None] = [None]
        if is_main_process() and folder not in self._files:
            try:
                problem[0] = self._lock(folder)
            except OSError as error:
                problem[0] = (
                    f"{folder / LOCK_FILE} cannot be written ({error.strerror}); check the free space and the "
                    "permissions, or choose another folder"
                )
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise ConfigError(problem[0], key)

    def release(self) -> None:
        """Release all locks, even if child processes share them."""
        while self._files:
            import fcntl

            with self._files.popitem()[1] as file:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _lock(self, folder: Path) -> str | None:
        """Lock `folder` and return None, or return the reason why this run must not use the folder."""
        if os.name != "posix":
            return None
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        # Without a buffer, so that closing the file cannot fail on a full disk.
        file = (folder / LOCK_FILE).open("ab+", buffering=0)
        deadline = time.monotonic() + _TIMEOUT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    file.close()
                    self._warn(f"{folder} cannot be locked ({error}), so a second run will not be detected")
                    return None
            file.seek(0)
            holder = os.fsdecode(file.readline().strip()) or "another process"
            # A run that continues may replace the checkpoint that this run has chosen, so wait only for one that ends.
            if _is_running(holder) or time.monotonic() > deadline:
                file.close()
                return f"{folder} is in use by {holder}; wait for that run to finish or choose another folder"
            time.sleep(0.1)
        owner = _owner(folder)
        if owner is not None and owner != self._work_dir and owner.exists():
            file.close()
            return (
                f"{folder} contains the checkpoints of the run in {owner}, but this run is in {self._work_dir}; choose "
                "another folder"
            )
        file.truncate(0)
        holder = (
            f"process {os.getpid()} on {socket.gethostname()} (since {time.strftime('%Y-%m-%d %H:%M:%S')})"
        )
        file.write(os.fsencode(f"{holder}\n{os.path.relpath(self._work_dir, folder)}"))
        remove_temporary_files(folder)
        remove_partial_checkpoints(folder)
        self._files[folder] = file
        return None


def _is_running(holder: str) -> bool:
    """Return whether the process in the first line of a lock file runs on this machine."""
    found = re.match(r"process (\d+) on (.+) \(since", holder)
    return found is not None and found[2] == socket.gethostname() and Path(f"/proc/{found[1]}").exists()


def _owner(folder: Path) -> Path | None:
    """Return the work_dir of the run that writes to `folder`, which is resolved, or None if it is unknown."""
    owner = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="surrogateescape").partition("\n")[2]
    return Path(os.path.normpath(folder / owner)) if owner else None
