"""Run a list of short tasks in multiple threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from typing import TypeVar

__all__ = ["run_in_threads"]

T = TypeVar("T")


def run_in_threads(
    action: Callable[[T], object], items: Sequence[T], pool: Executor, extra_threads: int
) -> None:
    """Call `action` for each item, in the calling thread and in up to `extra_threads` threads from `pool`.

    Each thread takes the next item, so a thread whose core is busy with another process delays only one item. When this
    function returns or raises, no thread is still running `action`.

    Raises:
        Exception: an exception raised by `action`.
    """
    rest = iter(list(items))  # shared by the threads

    def take() -> None:
        for item in rest:
            action(item)

    running = [pool.submit(take) for _ in range(min(extra_threads, len(items) - 1))]
    try:
        take()
    finally:
        wait(running)
    for thread in running:
        thread.result()
