"""Find the checkpoints of a run in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slipstream.checkpoint.files import PLAIN_FILE, replaced_name
from slipstream.checkpoint.safetensors_files import in_folder
from slipstream.checkpoint.sharded import read_origin
from slipstream.errors import CheckpointError
from slipstream.files import write_text

__all__ = ["checkpoint_of", "find_latest_checkpoint", "mark_last_checkpoint", "newest_checkpoints"]

LAST_FILE = "last_checkpoint"
# File with the ID of the run that wrote `last_checkpoint`, in case that checkpoint is damaged.
_RUN_FILE = ".last_run"
_BEST_PATTERNS = ("best_*.pth", "best_*.sharded", "ckpt_best.pth", "ckpt_best.sharded")
_MAX_LISTED = 5


def mark_last_checkpoint(folder: str | Path, path: Path, run_id: str | None = None) -> None:
    """Make `path` the checkpoint that `find_latest_checkpoint(folder)` returns; `run_id` is the run that wrote it."""
    if run_id is not None:
        write_text(Path(folder) / _RUN_FILE, run_id)
    write_text(Path(folder) / LAST_FILE, str(path.absolute()))


def find_latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint that `last_checkpoint` in `folder` refers to, or None if this file does not exist.

    If `folder` was moved or copied, the result is the file of the same name in `folder`.

    Raises:
        CheckpointError: `last_checkpoint` cannot be read, or it refers to a checkpoint that does not exist.
    """
    pointer = Path(folder) / LAST_FILE
    if not pointer.is_file():
        return None
    try:
        latest = Path(pointer.read_text(encoding="utf-8").strip())
        run_id = _last_run(Path(folder))
        # The folder may also contain a file of the same name from an earlier run.
        paths = sorted([Path(folder) / latest.name, latest], key=lambda path: read_origin(path)[0] != run_id)
        for path in paths:
            # A run may have been killed while it was replacing a sharded checkpoint.
            for candidate in (path, replaced_name(path)):
                if candidate.exists():
                    return candidate
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{pointer} is damaged ({error}); pass the path of a checkpoint instead"
        ) from error
    raise CheckpointError(
        f"{pointer} refers to {latest}, which does not exist; pass the path of a checkpoint instead"
    )


def checkpoint_of(path: Path) -> Path:
    """Return a checkpoint from a run's folder, or the safetensors file or index in another folder.

    Other paths, such as sharded checkpoints, are returned unchanged. For a run, the result is the newest best
    checkpoint, or the latest checkpoint if no best checkpoint was saved.

    Raises:
        CheckpointError: the folder contains no checkpoint.
    """
    if not path.is_dir() or path.suffix == ".sharded" or (path / PLAIN_FILE).is_file():
        return path
    best = _by_age([path], _BEST_PATTERNS)
    found = best[0] if best else find_latest_checkpoint(path) or in_folder(path)
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
            a checkpoint that does not exist.
    """
    folder, latest, error = Path(folder), None, None
    try:
        latest = find_latest_checkpoint(folder)
    except CheckpointError as problem:
        error = problem
    if latest is not None:
        yield latest
    # CheckpointHook may write to another folder (`out_dir`).
    folders = {path.resolve(): path for path in (folder, *([latest.parent] if latest else []))}
    others = [path for path in _by_age(folders.values()) if path != latest]
    origins = {path: read_origin(path) for path in others}
    run_id = _last_run(folder) or (read_origin(latest)[0] if latest else None)
    if run_id is None:  # only the newest readable file is known to belong to the last run
        run_id = next((run for run, iteration in origins.values() if iteration is not None), None)
    iterations = {path: iteration for path, (_, iteration) in origins.items() if iteration is not None}
    if foreign := [path.name for path in iterations if origins[path][0] != run_id]:
        more = f" and {len(foreign) - _MAX_LISTED} more" if len(foreign) > _MAX_LISTED else ""
        warn(f"ignoring {', '.join(foreign[:_MAX_LISTED])}{more} in {folder}: not written by this run")
    own = [path for path in iterations if origins[path][0] == run_id]
    usable = [
        *sorted(own, key=lambda path: iterations[path], reverse=True),
        *(path for path in others if path not in iterations),
    ]
    if error is not None and not usable:
        raise error
    if latest is None and own:
        warn(str(error or f"{folder / LAST_FILE} does not exist"))
    yield from usable


def _last_run(folder: Path) -> str | None:
    """Return the ID of the run that wrote `last_checkpoint`, or None if it is unknown."""
    file = folder / _RUN_FILE
    return file.read_text(encoding="utf-8").partition(" ")[0] if file.is_file() else None


def _by_age(folders: Iterable[Path], patterns: Iterable[str] = ("*.pth", "*.sharded")) -> list[Path]:
    """Return the checkpoints in the folders whose names match a pattern, from newest to oldest."""
    paths = [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]
    ages = {path: path.stat().st_mtime for path in paths if path.exists() and not path.name.startswith(".")}
    return sorted(ages, key=lambda path: ages[path], reverse=True)
