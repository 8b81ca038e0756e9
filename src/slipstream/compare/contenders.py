"""The same training run, implemented as a hand-written loop and with each framework.

Each function trains `work.net` on `work.loader` and returns the duration of the last epoch in seconds, excluding setup.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from slipstream.tune.jobs import WarningLog, compile_problem
from slipstream.tune.observer import Observer

__all__ = ["CONTENDERS", "Contender", "Work", "compiled_loop", "hand_written", "with_slipstream"]

_run_number = count()


@dataclass(frozen=True)
class Work:
    """The training run to measure."""

    net: nn.Module
    loader: DataLoader[Any]
    loss: Callable[[Any, Any], Tensor]
    """`loss(net, batch)` returns the loss to minimize; `net` may be wrapped by the framework."""
    make_optimizer: Callable[[nn.Module], Optimizer]
    folder: str
    """Folder for the files that the framework writes."""
    epochs: int = 1
    """Number of epochs. Only the last one is timed; compilation happens in the earlier epochs."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # devices are immutable
    """The device of the network and the batches."""
    observer: Observer | None = None
    """Called after each step."""

    def after_step(self, loss: Tensor) -> None:
        """Call the observer, if any, with the detached loss."""
        if self.observer is not None:
            self.observer.after_step(loss.detach())


class _Clock:
    """Measures the duration of an epoch in seconds."""

    seconds: float = 0.0

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self.seconds = perf_counter() - self._started


def hand_written(work: Work, compiled: bool = False) -> float:
    """Train with a loop in plain PyTorch, optionally with `torch.compile(model)`."""
    optimizer, clock = work.make_optimizer(work.net), _Clock()
    net: Any = torch.compile(work.net) if compiled else work.net
    net.train()
    for _ in range(work.epochs):
        clock.start()
        for batch in work.loader:
            loss = work.loss(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            work.after_step(loss)
        clock.stop()
    return clock.seconds


compiled_loop = partial(hand_written, compiled=True)


def with_accelerate(work: Work) -> float:
    """Train with Accelerate, using the loop from its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=work.device.type == "cpu")
    net, optimizer, loader = accelerator.prepare(work.net, work.make_optimizer(work.net), work.loader)
    clock = _Clock()
    net.train()
    for _ in range(work.epochs):
        clock.start()
        for batch in loader:
            loss = work.loss(net, batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            work.after_step(loss)
        clock.stop()
    accelerator.free_memory()
    return clock.seconds


def with_lightning(work: Work) -> float:
    """Train with Lightning's Trainer, without loggers, checkpoints or a progress bar."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return work.loss(self.net, batch)

        def configure_optimizers(self) -> Optimizer:
            return work.make_optimizer(self.net)

    class Epochs(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            clock.start()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            clock.stop()

    class Steps(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            work.after_step(outputs["loss"] if isinstance(outputs, Mapping) else outputs)

    clock = _Clock()
    trainer = pl.Trainer(
        accelerator="cpu" if work.device.type == "cpu" else "auto",
        devices=1,
        max_epochs=work.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=work.folder,
        callbacks=[Epochs(), *([Steps()] if work.observer is not None else [])],
    )
    trainer.fit(Module(), work.loader)
    return clock.seconds


def with_mmengine(work: Work) -> float:
    """Train with MMEngine's Runner."""
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    # MMEngine's loggers and hubs are global, so each run needs a unique name.
    return _with_runner(work, BaseModel, Hook, Runner, experiment_name=f"run{next(_run_number)}")


def with_slipstream(work: Work, **options: Any) -> float:
    """Train with Slipstream's Runner.

    Args:
        work: the training run.
        options: additional arguments for the Runner, such as `speed`.
    """
    from slipstream.hooks import Hook
    from slipstream.model import BaseModel
    from slipstream.runner import Runner

    return _with_runner(work, BaseModel, Hook, Runner, **options)


def _with_runner(work: Work, base_model: Any, base_hook: Any, runner: Any, **options: Any) -> float:
    """Train with MMEngine's or Slipstream's Runner, with all default hooks except the checkpoint hook.

    For loaders without a batch sampler, the sampler hook is also disabled, because MMEngine's sampler hook does not
    support such loaders.
    """

    class Model(base_model):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def forward(self, *batch: Any, mode: str, **kwargs: Any) -> dict[str, Tensor]:
            return {"loss": work.loss(self.net, batch or kwargs)}

        def init_weights(self) -> None:
            """Keep the initial weights, because all contenders must start from the same weights."""

    class Epochs(base_hook):
        def before_train_epoch(self, runner: Any) -> None:
            clock.start()

        def after_train_epoch(self, runner: Any) -> None:
            clock.stop()

    class Steps(base_hook):
        priority = "LOWEST"

        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            work.after_step(outputs["loss"])

    clock = _Clock()
    hooks: dict[str, Any] = dict(logger=dict(type="LoggerHook", interval=50), checkpoint=None)
    if work.loader.batch_sampler is None:
        hooks["sampler_seed"] = None
    run = runner(
        model=Model(),
        work_dir=work.folder,
        train_dataloader=work.loader,
        train_cfg=dict(by_epoch=True, max_epochs=work.epochs),
        optim_wrapper=dict(optimizer=work.make_optimizer(work.net)),
        default_hooks=hooks,
        custom_hooks=[Epochs(), *([Steps()] if work.observer is not None else [])],
        **options,
    )
    if runner.__module__.startswith("slipstream."):
        _observe(run, work.observer)
    run.train()
    run.visualizer.close()
    return clock.seconds


def _observe(runner: Any, observer: Observer | None) -> None:
    """Make an observed run wait for compilation, and report to the observer whether the compiled code is used."""
    if observer is None:
        return
    from slipstream.model import unwrap_model

    if (options := runner.speed.compile) is not None:
        runner.speed = replace(runner.speed, compile=replace(options, wait=True))
    warnings = WarningLog()
    runner.logger.addHandler(warnings)
    observer.describe = lambda: {
        "problem": compile_problem(runner.speed, runner.step, unwrap_model(runner.model), warnings.messages),
        "options": sorted(runner.speed.sources),
    }


@dataclass(frozen=True)
class Contender:
    """A framework, optionally with special options, that performs the training run."""

    label: str
    package: str
    """Name of the required package."""
    train: Callable[[Work], float]


CONTENDERS = {
    "loop": Contender("hand-written loop", "torch", hand_written),
    "loop_compiled": Contender("hand-written loop, torch.compile(model)", "torch", compiled_loop),
    "accelerate": Contender("Accelerate", "accelerate", with_accelerate),
    "lightning": Contender("Lightning", "lightning", with_lightning),
    "mmengine": Contender("MMEngine", "mmengine", with_mmengine),
    "slipstream": Contender("Slipstream", "slipstream", with_slipstream),
    "slipstream_auto": Contender(
        'Slipstream, speed="auto"', "slipstream", partial(with_slipstream, speed="auto")
    ),
    "slipstream_compiled": Contender(
        "Slipstream, compile=step",
        "slipstream",
        partial(with_slipstream, speed={"compile": {"scope": "step"}}),
    ),
}
"""Maps the names that `slipstream compare --with` accepts to the contenders."""
