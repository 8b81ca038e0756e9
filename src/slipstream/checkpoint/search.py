"""Find the checkpoints of a run in its folder."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from slipstream.checkpoint.files import PLAIN_FILE, replaced_name
from slipstream.checkpoint.owner import folder_owner
from slipstream.checkpoint.sharded import read_origin
from slipstream.errors import CheckpointError
from slipstream.files import write_text

__all__ = ["checkpoint_of", "find_latest_checkpoint", "mark_last_checkpoint", "newest_checkpoints"]

LAST_FILE = "last_checkpoint"
_ORIGIN_FILE = ".last_run"
"""File with the run ID and the iteration of the checkpoint that `last_checkpoint` refers to.

If that checkpoint is damaged, they are used to select another one.
"""
_BEST_PATTERNS = ("best_*.pth", "best_*.sharded", "ckpt_best.pth", "ckpt_best.sharded")
_MAX_LISTED = 5


def mark_last_checkpoint(
    folder: str | Path, path: Path, run_id: str | None = None, iteration: int | None = None
) -> None:
    """Make `path` the checkpoint that `find_latest_checkpoint(folder)` returns.

    `run_id` and `iteration` are the ID of the run that wrote `path` and the iteration at which it was written. If the
    checkpoint is damaged, they determine which checkpoint is used instead.
    """
    if run_id is not None:
        write_text(Path(folder) / _ORIGIN_FILE, f"{run_id} {iteration}")
    write_text(Path(folder) / LAST_FILE, str(path.absolute()))


def find_latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint that `last_checkpoint` in `folder` refers to, or None if this file does not exist.

    Raises:
        CheckpointError: `last_checkpoint` cannot be read, or it refers to a checkpoint that does not exist or
            belongs to another run.
    """
    pointer = Path(folder) / LAST_FILE
    if not pointer.is_file():
        return None
    try:
        latest = Path(pointer.read_text(encoding="utf-8").strip())
        owner = folder_owner(latest.parent)
        if owner == Path(folder).resolve():
            paths = [latest]
        else:
            # The folder was moved or copied, or `latest` is in a folder without a lock. If another run owns that
            # folder, it may have overwritten `latest`.
            paths = [Path(folder) / latest.name, *([latest] if owner is None or not owner.exists() else [])]
            origin = _stored_origin(Path(folder))
            paths.sort(key=lambda path: origin is None or read_origin(path) != origin)
        # A run may have been killed while it was replacing a sharded checkpoint.
        for candidate in (found for path in paths for found in (path, replaced_name(path))):
            if candidate.exists():
                return candidate
        problem = "does not exist" if latest in paths else f"belongs to the run in {owner}"
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{pointer} is damaged ({error}); pass the path of a checkpoint instead"
        ) from error
    raise CheckpointError(
        f"{pointer} refers to {latest}, which {problem}; pass the path of a checkpoint instead"
    )


def checkpoint_of(path: Path) -> Path:
    """Return a checkpoint from a run's folder; other paths, such as sharded checkpoints, are returned unchanged.

    The result is the newest best checkpoint, or the latest checkpoint if no best checkpoint was saved.

    Raises:
        CheckpointError: the folder contains no checkpoint.
    """
    if not path.is_dir() or path.suffix == ".sharded" or (path / PLAIN_FILE).is_file():
        return path
    best = _by_age([path], _BEST_PATTERNS)
    found = best[0] if best else find_latest_checkpoint(path)
    if found is None:
        raise CheckpointError(
            f"the folder {path} contains no checkpoint; train first, or pass the path of a checkpoint"
        )
    return found


def newest_checkpoints(folder: str | Path, warn: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """Yield the checkpoint that `last_checkpoint` refers to, then the run's other checkpoints, latest iteration first.

    File times are not used for the order, because copying a file can change them. Checkpoints whose iteration cannot be
    read come last.

    Args:
        folder: the work_dir.
        warn: called with a message if `last_checkpoint` does not refer to a checkpoint, or if the folder contains
            checkpoints from other runs, which are not used.

    Raises:
        CheckpointError: this run has no other checkpoint, and `last_checkpoint` either cannot be read or refers to
            a checkpoint that does not exist or belongs to another run.
    """
    folder, latest, error = Path(folder), None, None
    try:
        latest = find_latest_checkpoint(folder)
    except CheckpointError as problem:
        error = problem
    # CheckpointHook may write to another folder (`out_dir`).
    folders = {path.resolve(): path for path in (folder, *([latest.parent] if latest else []))}
    stored = _stored_origin(folder)
    if latest is not None and stored is not None and read_origin(latest)[0] not in (stored[0], None):
        error = CheckpointError(
            f"{folder / LAST_FILE} refers to {latest}, which was written by another run; pass the path of a checkpoint "
            "instead"
        )
        latest = None
    if latest is not None:
        yield latest
    others = [path for path in _by_age(folders.values()) if path != latest]
    usable = _of_last_run(folder, latest, others, warn)
    if error is not None and not usable:
        raise error
    if latest is None and any(read_origin(path)[1] is not None for path in usable):
        warn(str(error or f"{folder / LAST_FILE} does not exist"))
    yield from usable


def _of_last_run(
    folder: Path, latest: Path | None, others: Sequence[Path], warn: Callable[[str], None]
) -> list[Path]:
    """Return the checkpoints in `others` that the folder's last run can resume from, in the order in which to try them.

    Args:
        folder: the work_dir.
        latest: the checkpoint that `last_checkpoint` refers to.
        others: the other checkpoints, newest first.
        warn: called with a message about checkpoints from other runs, which are excluded.
    """
    origins = {path: read_origin(path) for path in others}
    run_id, last = _stored_origin(folder) or (read_origin(latest) if latest else (None, None))
    if last is None:  # only the newest file is known to belong to the last run
        run_id = next((run for run, iteration in origins.values() if iteration is not None), None)
        last = sys.maxsize
    iterations = {path: iteration for path, (_, iteration) in origins.items() if iteration is not None}
    own = {path: iteration for path, iteration in iterations.items() if origins[path][0] == run_id}
    if foreign := [path.name for path in iterations if path not in own]:
        more = f" and {len(foreign) - _MAX_LISTED} more" if len(foreign) > _MAX_LISTED else ""
        warn(f"ignoring {', '.join(foreign[:_MAX_LISTED])}{more} in {folder}: not written by this run")
    # If the run has rolled back, the iterations after its last checkpoint were discarded.
    ordered = sorted(own, key=lambda path: (own[path] <= last, own[path]), reverse=True)
    return [*ordered, *(path for path in others if path not in iterations)]


def _stored_origin(folder: Path) -> tuple[str, int] | None:
    """Return the run ID and the iteration that `mark_last_checkpoint` stored, or None if they cannot be read."""
    try:
        run_id, iteration = (folder / _ORIGIN_FILE).read_text(encoding="utf-8").split()
        return run_id, int(iteration)
    except (OSError, ValueError):  # a checkpoint from another engine, or a damaged file
        return None


def _by_age(folders: Iterable[Path], patterns: Sequence[str] = ("*.pth", "*.sharded")) -> list[Path]:
    """Return the checkpoints in the folders whose names match a pattern, from newest to oldest."""
    ages: dict[Path, float] = {}
    for path in (path for folder in folders for pattern in patterns for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):  # a dangling symlink, or a file that was just removed
            if not path.name.startswith("."):
                ages[path] = path.stat().st_mtime
    return sorted(ages, key=lambda path: ages[path], reverse=True)
