"""One epoch of the same training run with a hand-written loop and with each framework.

Each function trains `work.net` on `work.loader` and returns the duration of the epoch in seconds,
excluding setup.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_run_number = count()


@dataclass(frozen=True)
class Work:
    """The training run to measure."""

    net: nn.Module
    loader: DataLoader[Any]
    criterion: Callable[[Tensor, Tensor], Tensor]
    folder: str
    """Folder for the files that the framework writes."""
    epochs: int = 1
    """Number of epochs. Only the last one is timed; compilation takes place in the earlier ones."""

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)


class Clock:
    """A clock that stores the duration of the epoch."""

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self.seconds = perf_counter() - self._started


def hand_written(work: Work, compiled: bool = False) -> float:
    criterion, optimizer, clock = work.criterion, work.optimizer(), Clock()
    net = torch.compile(work.net) if compiled else work.net
    net.train()
    for _ in range(work.epochs):
        clock.start()
        for inputs, targets in work.loader:
            loss = criterion(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clock.stop()
    return clock.seconds


def with_accelerate(work: Work) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(work.net, work.optimizer(), work.loader)
    criterion, clock = work.criterion, Clock()
    net.train()
    clock.start()
    for inputs, targets in loader:
        loss = criterion(net(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    clock.stop()
    accelerator.free_memory()
    return clock.seconds


def with_lightning(work: Work) -> float:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            return work.criterion(self.net(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer()

    class Timer(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            clock.start()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            clock.stop()

    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=work.folder,
        callbacks=[Timer()],
    )
    trainer.fit(Module(), work.loader)
    return clock.seconds


def with_mmengine(work: Work) -> float:
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    # MMEngine's loggers and hubs are global, so each run needs a unique name.
    return _with_runner(work, BaseModel, Hook, Runner, experiment_name=f"run{next(_run_number)}")


def with_slipstream(work: Work, **options: Any) -> float:
    from slipstream.hooks import Hook
    from slipstream.model import BaseModel
    from slipstream.runner import Runner

    return _with_runner(work, BaseModel, Hook, Runner, **options)


def _with_runner(work: Work, base_model: Any, base_hook: Any, runner: Any, **options: Any) -> float:
    """Train with MMEngine's or Slipstream's Runner, with all default hooks except the checkpoint hook.

    MMEngine's sampler hook, which runs once per epoch, does not support loaders of precomputed batches.
    """

    class Model(base_model):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def forward(self, inputs: Tensor, targets: Tensor, mode: str) -> dict[str, Tensor]:
            return {"loss": work.criterion(self.net(inputs), targets)}

    class Timer(base_hook):
        def before_train_epoch(self, runner: Any) -> None:
            clock.start()

        def after_train_epoch(self, runner: Any) -> None:
            clock.stop()

    clock = Clock()
    hooks: dict[str, Any] = dict(logger=dict(type="LoggerHook", interval=50), checkpoint=None)
    if work.loader.batch_sampler is None:
        hooks["sampler_seed"] = None
    run = runner(
        model=Model(),
        work_dir=work.folder,
        train_dataloader=work.loader,
        train_cfg=dict(by_epoch=True, max_epochs=work.epochs),
        optim_wrapper=dict(optimizer=work.optimizer()),
        default_hooks=hooks,
        custom_hooks=[Timer()],
        **options,
    )
    run.train()
    run.visualizer.close()
    return clock.seconds


CONTENDERS: dict[str, tuple[str, Callable[[Work], float]]] = {
    "loop": ("torch", hand_written),
    "Accelerate": ("accelerate", with_accelerate),
    "Lightning": ("lightning", with_lightning),
    "MMEngine": ("mmengine", with_mmengine),
    "Slipstream": ("slipstream", with_slipstream),
}
"""The contenders, and the package that each requires."""


COMPILED: dict[str, Callable[[Work], float]] = {
    "loop": hand_written,
    "loop, torch.compile(model)": lambda work: hand_written(work, compiled=True),
    "Slipstream, one graph": lambda work: with_slipstream(
        work, speed={"compile": {"scope": "step", "cache": False, "wait": True}}
    ),
}


def installed() -> dict[str, Callable[[Work], float]]:
    """Return the contenders whose packages are installed; print the names of the others."""
    found = {}
    for name, (package, contender) in CONTENDERS.items():
        if find_spec(package) is None:
            print(f"skipping {name}: {package} is not installed (pip install -e '.[bench]')")
        else:
            found[name] = contender
    return found
