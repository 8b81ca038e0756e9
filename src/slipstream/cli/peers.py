"""The same training run as a hand-written loop and with each framework, for `slipstream bench --against`.

Each function trains `work.net` on `work.loader`, and calls `work.after_step` with the loss after each step.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from slipstream.errors import ConfigError, DataError
from slipstream.model import unwrap_model
from slipstream.model.base_model import run_forward
from slipstream.step import sum_losses
from slipstream.tune.jobs import RepeatedBatches, RunnerJob, Setting
from slipstream.tune.observer import Observer

# Maximum number of distinct batches. Training repeats these batches.
_NUM_BATCHES = 6
# SuperGradients' keys for options that change how the step is computed.
_PARAMS = (
    "ema",
    "ema_params",
    "sync_bn",
    "mixed_precision",
    "torch_compile",
    "torch_compile_options",
    "speed",
)
_run_number = count()


@dataclass(frozen=True)
class Work:
    """The training run to measure."""

    net: nn.Module
    loader: DataLoader[Any]
    # `loss(net, batch)` returns the loss to minimize; `net` may be wrapped by the framework.
    loss: Callable[[Any, Any], Tensor]
    make_optimizer: Callable[[nn.Module], Optimizer]
    # Folder for the files that the framework writes.
    folder: str
    # Called with the detached loss after each step.
    after_step: Callable[[Tensor], None]
    epochs: int = 1
    # The device of the network and the batches.
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # devices are immutable


def hand_written(work: Work, compiled: bool = False) -> None:
    """Train with a loop in plain PyTorch, optionally with `torch.compile(model)`."""
    optimizer = work.make_optimizer(work.net)
    net: Any = torch.compile(work.net) if compiled else work.net
    net.train()
    for batch in chain.from_iterable(work.loader for _ in range(work.epochs)):
        loss = work.loss(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        work.after_step(loss.detach())


def with_accelerate(work: Work) -> None:
    """Train with Accelerate, using the loop from its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=work.device.type == "cpu")
    net, optimizer, loader = accelerator.prepare(work.net, work.make_optimizer(work.net), work.loader)
    net.train()
    for batch in chain.from_iterable(loader for _ in range(work.epochs)):
        loss = work.loss(net, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        work.after_step(loss.detach())
    accelerator.free_memory()


def with_lightning(work: Work) -> None:
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

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            work.after_step(loss.detach())

    trainer = pl.Trainer(
        accelerator="cpu" if work.device.type == "cpu" else "auto", devices=1, max_epochs=work.epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=work.folder,
    )  # fmt: skip
    trainer.fit(Module(), work.loader)


def with_mmengine(work: Work) -> None:
    """Train with MMEngine's Runner."""
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    # MMEngine's loggers and hubs are global, so each run needs a unique name.
    _with_runner(work, BaseModel, Hook, Runner, experiment_name=f"run{next(_run_number)}")


def with_slipstream(work: Work, **options: Any) -> None:
    """Train with Slipstream's Runner. `options` are additional arguments for the Runner, such as `speed`."""
    from slipstream.hooks import Hook
    from slipstream.model import BaseModel
    from slipstream.runner import Runner

    _with_runner(work, BaseModel, Hook, Runner, **options)


def with_slipstream_accelerate(work: Work) -> None:
    """Train with `slipstream.accelerate` in a loop."""
    from slipstream.train_step import accelerate

    work.net.train()
    step = accelerate(work.net, work.make_optimizer(work.net), compute_loss=work.loss, speed=None)
    for batch in chain.from_iterable(work.loader for _ in range(work.epochs)):
        work.after_step(step(batch)["loss"])


def with_slipstream_trainer(work: Work) -> None:
    """Train with Slipstream's Trainer; the loss is computed from the outputs and the targets of a batch of two."""
    from slipstream.training import Trainer
    from slipstream.training.callbacks import Callback

    class Steps(Callback):
        def on_train_batch_end(self, context: Any) -> None:
            work.after_step(torch.zeros(()))

    def loss(outputs: Any, targets: Any) -> Tensor:
        return work.loss(lambda inputs: outputs, (None, targets))

    params = {"max_epochs": work.epochs, "loss": loss, "optimizer": work.make_optimizer(work.net)}
    trainer = Trainer("overhead", ckpt_root_dir=work.folder)
    trainer.train(work.net, {**params, "phase_callbacks": [Steps()]}, work.loader)


def _with_runner(work: Work, base_model: Any, base_hook: Any, runner: Any, **options: Any) -> None:
    """Train with MMEngine's or Slipstream's Runner and its default hooks.

    For loaders without a batch sampler, the sampler hook is disabled, because MMEngine's sampler hook does not support
    such loaders.
    """

    class Model(base_model):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def forward(self, *batch: Any, mode: str, **kwargs: Any) -> dict[str, Tensor]:
            return {"loss": work.loss(self.net, batch or kwargs)}

        def init_weights(self) -> None:
            """Keep the initial weights, because all contenders must start from the same weights."""

    class Steps(base_hook):
        priority = "LOWEST"

        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            work.after_step(outputs["loss"].detach())

    hooks = {"sampler_seed": None} if work.loader.batch_sampler is None else None
    run = runner(
        model=Model(),
        work_dir=work.folder,
        train_dataloader=work.loader,
        train_cfg={"by_epoch": True, "max_epochs": work.epochs},
        optim_wrapper={"optimizer": work.make_optimizer(work.net)},
        default_hooks=hooks,
        custom_hooks=[Steps()],
        **options,
    )
    run.train()
    run.visualizer.close()


# Maps the names that `slipstream bench --against` accepts to the contenders.
CONTENDERS: dict[str, Callable[[Work], None]] = {
    "loop": hand_written,
    "loop_compiled": partial(hand_written, compiled=True),
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "mmengine": with_mmengine,
    "slipstream": with_slipstream,
    "slipstream_compiled": partial(with_slipstream, speed={"compile": {"scope": "step"}}),
}
# The contenders that require a package of the same name.
FRAMEWORKS = ("accelerate", "lightning", "mmengine")


class _Subject(NamedTuple):
    """A model, preprocessed batches on its device, and an optimizer for its parameters."""

    model: nn.Module
    batches: list[Any]
    optimizer: Optimizer
    # Number of samples in each batch.
    samples: int


@dataclass(frozen=True)
class PeerJob:
    """Trains a subject with one contender; see `Job`. Each process has its own copy of the subject."""

    name: str
    subject: _Subject

    def train(self, observer: Observer, folder: Path) -> None:
        """Train until the observer ends the trial."""
        model, batches, optimizer, samples = self.subject
        loader = DataLoader(RepeatedBatches(batches, 10**9), batch_size=None)
        observer.describe = lambda: {"samples": samples, "problem": None, "buffered": 0}
        device = next(model.parameters()).device
        after_step, make_optimizer = observer.after_step, lambda net: optimizer
        work = Work(model, loader, _model_loss, make_optimizer, str(folder), after_step, device=device)
        CONTENDERS[self.name](work)


def _model_loss(net: Any, batch: Any) -> Tensor:
    """Return the sum of the losses that a `BaseModel` computes for a preprocessed batch."""
    return sum_losses(run_forward(net, batch, "loss"))[0]


def read_subject(cfg: Mapping[str, Any]) -> _Subject:
    """Return the model, the first batches and the optimizer that a Runner's configuration defines.

    Speed options, hooks, gradient accumulation and clipping, schedules and weight averaging are omitted, because the
    frameworks implement them differently. Batches with a different number of samples than the first batch are omitted.

    Raises:
        ConfigError: the optimizer wrapper has several optimizers.
        DataError: the training loader yields no batches.
    """
    from slipstream.dataset.loading.loader import BatchSizes
    from slipstream.runner import Runner
    from slipstream.runner.builders import build_optim
    from slipstream.runner.resume import init_weights
    from slipstream.training.config_paths import at_user_paths

    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        plain = RunnerJob(cfg, Setting()).trial_config(Path(folder))
        plain.update(speed=None, custom_hooks=[], param_scheduler=None, log_level="WARNING")
        plain.update(compile=None, model_wrapper_cfg=None)
        params = {k: v for k, v in (plain.get("training_params") or {}).items() if k not in _PARAMS}
        plain.training_params = params or None
        with at_user_paths(plain):
            runner = Runner.from_cfg(plain)
            model: Any = unwrap_model(runner.model)
            init_weights(model)
            optimizer = getattr(build_optim(model, plain.optim_wrapper), "optimizer", None)
            if not isinstance(optimizer, Optimizer):
                raise ConfigError("must have a single optimizer for the comparison", "optim_wrapper")
            batches = list(islice(runner.train_dataloader, _NUM_BATCHES))
            sizes = [BatchSizes(runner.train_dataloader).get(i, batch) for i, batch in enumerate(batches)]
            if not batches:
                raise DataError("train_dataloader yields no batches; check the dataset")
            full = [batch for batch, size in zip(batches, sizes, strict=True) if size == sizes[0]]
            prepared = [model.data_preprocessor(batch, True) for batch in full]
            runner.visualizer.close()
    return _Subject(model, prepared, optimizer, sizes[0])
