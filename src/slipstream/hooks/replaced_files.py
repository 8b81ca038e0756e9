"""Keep replaced files as long as a run can roll back to a checkpoint that refers to them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slipstream.checkpoint import remove_checkpoint
from slipstream.dist import is_main_process
from slipstream.typecheck import matches

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["COPY_SEPARATOR", "ReplacedFiles"]

COPY_SEPARATOR = "_until_iter_"
"""Separator before the step number in the name of a copy created by `ReplacedFiles.set_aside`."""


class _File(NamedTuple):
    """A file that was replaced at step `iteration`; `original` is its name before it was set aside."""

    name: str
    iteration: int
    original: str


class ReplacedFiles:
    """The files of a run (such as best checkpoints) that newer files have replaced.

    If rollbacks are disabled, these files are removed immediately. Otherwise, a replaced file is kept until every
    checkpoint to which the run can roll back is newer than the replacement. A rollback restores the files listed in
    the restored checkpoint, and removes the files that were written after this checkpoint. The list of replaced files
    is part of each checkpoint, so a resumed run removes the files that it no longer needs. Only rank 0 changes files.

    Args:
        key: key of the list in the message hub.
        is_own: `is_own(name)` returns whether a file in the list may have this name. The names are read from a
            checkpoint, which may be untrusted.
        remove: `remove(folder, name)` removes a file.
    """

    def __init__(
        self,
        key: str,
        is_own: Callable[[str], bool],
        remove: Callable[[Path, str], object] = remove_checkpoint,
    ) -> None:
        self._key, self._is_own, self._remove_file = key, is_own, remove
        self._files: list[_File] = []
        self._folder = Path()

    def load(self, runner: Runner, folder: Path, owns_files: bool = True) -> None:
        """Load the list of a resumed run, whose files are in `folder`, and remove the files that are no longer needed.

        If `owns_files` is False, the list belongs to a different run and is ignored.
        """
        self._folder = folder
        self._files = self._stored(runner) if owns_files else []
        self.remove_unused(runner)

    def add(self, runner: Runner, name: str) -> None:
        """Add a file that is being replaced by a file with a different name."""
        self._add(runner, _File(name, runner.iter, name))

    def set_aside(self, runner: Runner, name: str) -> None:
        """Keep a copy of a file that is being overwritten. The copy is a hard link if possible."""
        path = Path(name)
        copy = path.with_name(f"{path.stem}{COPY_SEPARATOR}{runner.iter}{path.suffix}").as_posix()
        if is_main_process():
            remove_checkpoint(self._folder, copy)
            _copy(self._folder / name, self._folder / copy)
        self._add(runner, _File(copy, runner.iter, name))

    def _add(self, runner: Runner, file: _File) -> None:
        self._files = [*(other for other in self._files if other.name != file.name), file]
        self._store(runner)

    def unused(self, runner: Runner) -> list[str]:
        """Return the names of the files that can be removed."""
        if not self._files:
            return []
        if runner.rollback.faults:
            runner.wait_for_checkpoint()  # the run can also roll back to a checkpoint that is being written
        oldest = runner.rollback.oldest_iteration
        unused = [file for file in self._files if oldest is None or file.iteration < oldest]
        # A file remains in the list until it is removed, because the run may be killed before the removal.
        self._files = [
            file for file in self._files if file not in unused or (self._folder / file.name).exists()
        ]
        self._store(runner)
        return [file.name for file in unused]

    def remove_unused(self, runner: Runner) -> None:
        """Remove the files that are no longer needed."""
        if unused := self.unused(runner):
            self._remove(unused)
            self._files = [file for file in self._files if file.name not in unused]
            self._store(runner)

    def remove_all(self) -> None:
        """Remove all files at the end of a run, after which no rollback is possible."""
        self._remove(file.name for file in self._files)

    def restore(self, runner: Runner, abandoned: Iterable[str], current: Iterable[str]) -> None:
        """Restore the files listed in a checkpoint after a rollback to this checkpoint.

        Args:
            runner: the Runner, whose message hub has been restored from the checkpoint.
            abandoned: names of the files that were in use before the rollback.
            current: names of the files that were in use when the checkpoint was written.
        """
        stored, pending = self._stored(runner), set(current)
        names_to_keep = pending | {file.name for file in stored}
        for file in self._files:
            if file in stored:
                continue
            if file.original in pending:  # the first replacement after the checkpoint
                pending.remove(file.original)
                self._move_back(file)
            elif file.name not in names_to_keep:
                self._remove([file.name])
        self._remove(name for name in abandoned if name not in names_to_keep)
        self._files = stored

    def _move_back(self, file: _File) -> None:
        source, target = self._folder / file.name, self._folder / file.original
        if source == target or not is_main_process() or not source.exists():
            return
        if source.is_dir():  # a folder cannot be replaced atomically
            remove_checkpoint(self._folder, file.original)
        source.replace(target)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if is_main_process():
                self._remove_file(self._folder, name)

    def _store(self, runner: Runner) -> None:
        runner.message_hub.update_info(self._key, [list(file) for file in self._files])

    def _stored(self, runner: Runner) -> list[_File]:
        entries = runner.message_hub.get_info(self._key, [])
        if not matches(entries, list[tuple[str, int, str]]):
            return []
        files = [_File(*entry) for entry in entries]
        return [file for file in files if self._is_own(file.name) and self._is_own(file.original)]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link)
    elif source.exists():
        _link(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system supports hard links
        shutil.copy2(source, target)
