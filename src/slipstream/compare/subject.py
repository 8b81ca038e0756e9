"""The training run that all contenders share: a model with its weights, prepared batches, and an optimizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from slipstream.config import Config
from slipstream.dataset.loading.loader import BatchSizes
from slipstream.devices import default_device
from slipstream.errors import ConfigError, DataError, UnknownNameError, did_you_mean
from slipstream.model import unwrap_model
from slipstream.model.base_model import run_forward
from slipstream.registry import MODELS
from slipstream.step.eager import sum_losses
from slipstream.tune.jobs import RunnerJob, Setting

__all__ = ["Batches", "Subject", "config_subject", "model_loss", "network_subject"]

_NUM_BATCHES = 6
"""Maximum number of distinct batches. Training repeats these batches."""
_NUM_CLASSES = 19
_NUM_STEPS = 10**9
_TRAINING_PARAMS = (
    "ema",
    "ema_params",
    "sync_bn",
    "mixed_precision",
    "torch_compile",
    "torch_compile_options",
    "speed",
)
"""SuperGradients' keys for options that change how the step is computed."""


@dataclass(frozen=True)
class Subject:
    """A model, batches on its device, and an optimizer for its parameters."""

    name: str
    model: nn.Module
    """A `BaseModel`."""
    batches: list[Any]
    """Preprocessed batches, which are passed to the model as arguments."""
    optimizer: Optimizer
    samples_per_step: int
    """Number of samples in each batch."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device


class Batches(Dataset[Any]):
    """A dataset whose samples are whole batches. The batches are repeated until the dataset has `length` samples."""

    def __init__(self, batches: list[Any], length: int = _NUM_STEPS) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._batches[index % len(self._batches)]


def model_loss(net: Any, batch: Any) -> Tensor:
    """Return the sum of the losses that a `BaseModel` computes for a preprocessed batch."""
    return sum_losses(run_forward(net, batch, "loss"))[0]


def config_subject(cfg: Mapping[str, Any], name: str) -> Subject:
    """Return the model, the first batches and the optimizer that a Runner's configuration defines.

    Speed options, hooks, gradient accumulation and clipping, schedules and weight averaging are omitted, because the
    frameworks implement them differently. The batches are loaded and preprocessed once. Batches with a different number
    of samples than the first batch are omitted, so that every step trains on the same number of samples.

    Raises:
        ConfigError: the configuration does not include training, or its optimizer wrapper has several optimizers.
        DataError: the training loader yields no batches.
    """
    from slipstream.runner import Runner
    from slipstream.runner.builders import build_optim
    from slipstream.runner.resume import init_weights
    from slipstream.training.config_paths import at_user_paths

    for key in ("train_dataloader", "train_cfg", "optim_wrapper"):
        if cfg.get(key) is None:
            raise ConfigError("is required, because the comparison measures training steps", key)
    with tempfile.TemporaryDirectory(prefix="slipstream-compare-") as folder:
        plain = _plain_config(cfg, Path(folder))
        with at_user_paths(plain):
            runner = Runner.from_cfg(plain)
            model: Any = unwrap_model(runner.model)
            init_weights(model)
            optimizer = getattr(build_optim(model, plain.optim_wrapper), "optimizer", None)
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    "must have a single optimizer, because the loops for the other frameworks use only one",
                    "optim_wrapper",
                )
            loader = runner.train_dataloader
            sizes = BatchSizes(loader)
            loaded = [(sizes.get(i, batch), batch) for i, batch in enumerate(islice(loader, _NUM_BATCHES))]
            if not loaded:
                raise DataError("train_dataloader yields no batches; check the dataset")
            samples = loaded[0][0]
            batches = [model.data_preprocessor(batch, True) for size, batch in loaded if size == samples]
            runner.visualizer.close()
    return Subject(name, model, batches, optimizer, samples)


def network_subject(name: str, size: tuple[int, int] = (128, 256), batch_size: int = 4) -> Subject:
    """Return a subject with a network from the registry, random images, random class ids, and SGD.

    Args:
        name: name of a network in `MODELS`.
        size: height and width of the images in pixels.
        batch_size: images per batch.

    Raises:
        UnknownNameError: no network has this name.
    """
    if MODELS.get(name) is None:
        known = MODELS.names()
        raise UnknownNameError(f"no recipe or network is named '{name}'{did_you_mean(name, known)}")
    device, generator = default_device(), torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = MODELS.build({"type": name, "num_classes": _NUM_CLASSES})
    images = [torch.randn(batch_size, 3, *size, generator=generator) for _ in range(_NUM_BATCHES)]
    with torch.random.fork_rng(), torch.no_grad():
        outputs = network.eval()(images[0][:1])
    dense = (outputs[0] if isinstance(outputs, tuple | list) else outputs).dim() == 4
    shape = (batch_size, *size) if dense else (batch_size,)
    targets = [torch.randint(0, _NUM_CLASSES, shape, generator=generator) for _ in range(_NUM_BATCHES)]
    kind = (
        {"type": "Segmentor", "loss": {"type": "MultiHeadCrossEntropy"}} if dense else {"type": "Classifier"}
    )
    model = MODELS.build({**kind, "network": network}).to(device).train()
    batches = [(x.to(device), y.to(device)) for x, y in zip(images, targets, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Subject(name, model, batches, optimizer, batch_size)


def _plain_config(cfg: Mapping[str, Any], folder: Path) -> Config:
    """Return the configuration without speed options or hooks. A run of this configuration writes only to `folder`."""
    plain = RunnerJob(cfg, Setting()).trial_config(folder)
    plain.speed, plain.custom_hooks, plain.param_scheduler = None, [], None
    params = {k: v for k, v in (plain.get("training_params") or {}).items() if k not in _TRAINING_PARAMS}
    plain.training_params = params or None
    for key in ("compile", "model_wrapper_cfg"):
        plain.pop(key, None)
    plain.log_level = "WARNING"
    return plain
