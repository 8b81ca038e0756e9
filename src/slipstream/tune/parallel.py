"""A trial with data-parallel training in several processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.dist import all_reduce
from slipstream.tune.observer import Observer
from slipstream.tune.process import WARMUP, forks

__all__ = ["launch"]

Train = Callable[[Observer, Path], None]


class _LossAverager(Observer):
    """Passes losses to another observer: the mean over all processes during the warm-up, then the local loss."""

    def __init__(self, inner: Observer) -> None:
        self._inner, self._remaining = inner, WARMUP

    def before_step(self, param_groups: Any) -> None:
        """Forward the call."""
        self._inner.before_step(param_groups)

    def after_step(self, loss: Tensor, updated: bool = True) -> None:
        """Forward the call with the mean loss or the local loss."""
        if self._remaining:
            self._remaining -= 1
            loss = loss.detach().clone()
            all_reduce(loss, "mean")
            if self._remaining == 0:
                self._inner.describe = self.describe
        self._inner.after_step(loss, updated)


def launch(train: Train, observer: Observer, folder: Path, processes: int) -> None:
    """Train in this process as rank 0, and in `processes` - 1 other processes on the same cores.

    The other processes are descendants of this process, so they are killed at the end of the trial.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    threads = max(torch.get_num_threads() // processes, 1)
    fork = forks()
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    work = train if fork else pickle.dumps(train)
    for rank in range(1, processes):
        arguments = (work, folder, rank, processes, port, threads)
        context.Process(target=_run_rank, args=arguments).start()
    _set_up_rank(0, processes, port, threads)
    train(_LossAverager(observer), folder)


def _run_rank(work: Any, folder: Path, rank: int, processes: int, port: int, threads: int) -> None:
    """Train as rank `rank`, in a new thread.

    A forked process has no copies of the parent's OpenMP threads, but a new thread starts its own.
    """
    arguments = (work, folder, rank, processes, port, threads)
    thread = threading.Thread(target=_train, args=arguments, daemon=True)
    thread.start()
    thread.join()
    os._exit(1)  # a rank returns only after an error; when it exits, the collectives of rank 0 fail


def _train(work: Any, folder: Path, rank: int, processes: int, port: int, threads: int) -> None:
    try:
        _set_up_rank(rank, processes, port, threads)
        train: Train = pickle.loads(work) if isinstance(work, bytes) else work
        train(_LossAverager(Observer()), folder)
    except BaseException:
        traceback.print_exc()


def _set_up_rank(rank: int, processes: int, port: int, threads: int) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(threads)
