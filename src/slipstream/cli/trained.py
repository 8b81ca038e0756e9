"""Find a run's checkpoint and build its model, for `slipstream predict` and `slipstream export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.checkpoint import (
    DESCRIPTION,
    check,
    checkpoint_of,
    load_checkpoint,
    load_weights,
    step_average,
    stored_config,
    weights_in,
)
from slipstream.cli.configure import load_config
from slipstream.config import Config, add_config_path
from slipstream.config.placeholders import has_references
from slipstream.dataset.prediction import validation_transforms
from slipstream.errors import CheckpointError, ModelError, SlipstreamError, UnknownNameError
from slipstream.model import Classifier, Segmentor
from slipstream.registry import MODELS, TRANSFORMS
from slipstream.runner.builders import build_model
from slipstream.training.network import SupervisedModel


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and the data from its checkpoint."""

    path: Path
    # The path, the metrics for which this checkpoint is the best, the epoch, and whether it contains an average.
    description: str
    model: Any
    # Validation transforms.
    transforms: Sequence[Any]
    transform_configs: Sequence[Any]
    classes: Sequence[str]
    palette: Sequence[Sequence[int]] | None


def find_checkpoint(name: str | None) -> Path:
    """Return the path of a checkpoint.

    Args:
        name: a checkpoint, which is returned unchanged, or the folder of a run; by default, the newest run in
            `work_dirs/`. For a run, the result is its newest best checkpoint, or its last checkpoint if no best
            checkpoint was saved.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    return checkpoint_of(_newest_run() if name is None else Path(name))


def load_trained(path: Path, config: str | None, trust: bool, device: torch.device) -> TrainedModel:
    """Build a checkpoint's model on `device`, in evaluation mode and without its loss, and load its weights.

    Args:
        path: the checkpoint.
        config: recipe or configuration file; by default, the configuration in the checkpoint.
        trust: see `Config.fromfile`.
        device: device on which to build the model.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not match the model.
        ConfigError: the configuration is invalid.
        ModelError: the model is a plain module that uses the Runner's `loss_fn`.
    """
    checkpoint = load_checkpoint(path)
    meta = checkpoint.get("meta") or {}
    check(meta, DESCRIPTION, path, "meta")
    cfg = load_config(config, trust=trust).cfg if config else Config(stored_config(meta))
    if "model" not in cfg:
        raise CheckpointError(f"{path} does not contain its configuration; set `--config`")
    try:
        model = _model(cfg).to(device).eval()
        configs = validation_transforms(cfg) or []
        with add_config_path(cfg, "val_dataloader.dataset.transforms"):
            transforms = [TRANSFORMS.build(config) for config in configs]
    except SlipstreamError as error:
        if config is None and (isinstance(error, UnknownNameError) or has_references(cfg)):
            raise CheckpointError(
                f"{path}: {error}. For a stored configuration, no modules are imported and no environment variables "
                "are read; set `--config` to the configuration file"
            ) from error
        raise
    weights = weights_in(checkpoint, path)
    if _is_task(cfg["model"]):
        weights = {name: value for name, value in weights.items() if not name.startswith("loss.")}
    network = getattr(model, "network", None)
    if isinstance(network, nn.Module) and weights.keys() == network.state_dict().keys():
        model_to_load: nn.Module = network  # saved in a custom training loop, or by a Runner with `loss_fn`
    else:
        model_to_load = model
    load_weights(model_to_load, weights, strict=True, source=str(path))
    data = meta.get("dataset_meta") or {}
    palette = data.get("palette")
    classes = list(data.get("classes") or ())
    classes += [str(index) for index in range(len(classes), len(palette or ()))]
    return TrainedModel(path, _description(path, checkpoint), model, transforms, configs, classes, palette)


def _model(cfg: Mapping[str, Any]) -> Any:
    """Build the model as the Runner does, with its data preprocessor."""
    if cfg.get("loss_fn") is not None:
        raise ModelError(
            "the configuration sets loss_fn, which does not define the model's predictions; use a Classifier, a "
            "Segmentor or a SupervisedModel with this network, or call Runner.test()"
        )
    config = cfg["model"]
    if _is_task(config):  # the class of the loss may be defined in a module that is not imported
        config = {key: value for key, value in config.items() if key != "loss"}
    with add_config_path(cfg, "model"):
        model = build_model(config, cfg.get("data_preprocessor"))
    if isinstance(model, SupervisedModel):
        model.watched_losses = ()  # unused in prediction, and they may require a teacher, which is not loaded
    return model


def _is_task(config: Any) -> bool:
    """Return whether the model is a `Segmentor`, `Classifier` or `SupervisedModel`.

    The predictions of these models do not depend on the loss.
    """
    kind = config.get("type") if isinstance(config, Mapping) else None
    return (MODELS.get(kind) if isinstance(kind, str) else kind) in (Segmentor, Classifier, SupervisedModel)


def _newest_run() -> Path:
    pointers = sorted(Path("work_dirs").glob("*/last_checkpoint"), key=lambda path: path.stat().st_mtime)
    if not pointers:
        raise CheckpointError("no checkpoint found in work_dirs/; train first or set `--checkpoint`")
    return pointers[-1].parent


def _description(path: Path, checkpoint: Mapping[str, Any]) -> str:
    epoch = (checkpoint.get("meta") or {}).get("epoch")
    details = [] if epoch is None else [f"epoch {epoch}"]
    if "ema_state_dict" in checkpoint or step_average(checkpoint):
        details.append("average of the weights")
    return f"{path} ({', '.join(details)})" if details else str(path)
