"""Progress bars with MMEngine's interface, for loops that do not use a Runner."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import Pool
from typing import Any, TextIO

__all__ = ["ProgressBar", "track_iter_progress", "track_parallel_progress", "track_progress"]


class ProgressBar:
    """Print the number of completed tasks, the elapsed time and, if the number of tasks is known, a bar.

    Args:
        task_num: number of tasks; 0 if unknown.
        bar_width: width of the bar in characters.
        start: whether to start measuring time immediately.
        file: the output stream.
    """

    def __init__(
        self, task_num: int = 0, bar_width: int = 50, start: bool = True, file: TextIO | None = None
    ) -> None:
        self.task_num, self.bar_width, self.completed = task_num, bar_width, 0
        self.file = file or sys.stdout
        self.start_time = time.monotonic()
        if start:
            self.start()

    def start(self) -> None:
        """Start measuring time."""
        self.start_time = time.monotonic()
        self._print()

    def update(self, num_tasks: int = 1) -> None:
        """Increase the number of completed tasks by `num_tasks`."""
        assert num_tasks > 0, f"the number of tasks must be positive, not {num_tasks}"
        self.completed += num_tasks
        self._print()

    def _print(self) -> None:
        elapsed = time.monotonic() - self.start_time
        if self.task_num:
            filled = min(self.bar_width, self.bar_width * self.completed // self.task_num)
            text = f"[{'>' * filled}{' ' * (self.bar_width - filled)}] {self.completed}/{self.task_num}"
        else:
            text = f"completed: {self.completed}"
        self.file.write(f"\r{text}, elapsed: {elapsed:.0f}s")
        if self.task_num and self.completed >= self.task_num:
            self.file.write("\n")
        self.file.flush()


def _unpack(tasks: Any) -> tuple[Iterable[Any], int]:
    """Return the tasks and their count; `tasks` is a sequence, or a tuple of an iterable and its length."""
    if isinstance(tasks, tuple) and len(tasks) == 2 and isinstance(tasks[1], int):
        return tasks[0], tasks[1]
    if not isinstance(tasks, Sequence):
        raise TypeError("tasks must be a sequence, or a tuple of an iterable and its length")
    return tasks, len(tasks)


def track_iter_progress(tasks: Any, bar_width: int = 50, file: TextIO | None = None) -> Iterator[Any]:
    """Yield the tasks and print the progress."""
    items, count = _unpack(tasks)
    bar = ProgressBar(count, bar_width, file=file)
    for task in items:
        yield task
        bar.update()


def track_progress(
    func: Callable[..., Any], tasks: Any, bar_width: int = 50, file: TextIO | None = None, **kwargs: Any
) -> list[Any]:
    """Return a list with `func(task)` for each task, and print the progress."""
    return [func(task, **kwargs) for task in track_iter_progress(tasks, bar_width, file)]


def track_parallel_progress(
    func: Callable[..., Any],
    tasks: Any,
    nproc: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
    bar_width: int = 50,
    chunksize: int = 1,
    skip_first: bool = False,
    keep_order: bool = True,
    file: TextIO | None = None,
) -> list[Any]:
    """Return `func(task)` for each task, computed in `nproc` processes, and print the progress.

    `skip_first` has no effect.
    """
    items, count = _unpack(tasks)
    with Pool(nproc, initializer, initargs) as pool:
        run = pool.imap if keep_order else pool.imap_unordered
        results = run(func, items, chunksize)
        return list(track_iter_progress((results, count), bar_width, file))
