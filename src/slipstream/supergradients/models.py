"""`models.get` with SuperGradients' argument order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.registry import MODELS
from slipstream.zoo import models

__all__ = ["get", "load_checkpoint_to_model"]

_DEFAULT_STRICT_LOAD = "no_key_matching"
"""SuperGradients' default: tensors are matched by order if the names differ."""


def get(
    model_name: str,
    arch_params: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    strict_load: Any = _DEFAULT_STRICT_LOAD,
    checkpoint_path: str | Path | None = None,
    pretrained_weights: str | None = None,
    load_backbone: bool = False,
    download_required_code: bool = True,
    checkpoint_num_classes: int | None = None,
    num_input_channels: int | None = None,
    checkpoint_sha256: str | None = None,
) -> nn.Module:
    """Return one of Slipstream's networks, or an instance of a class registered with `register_model`.

    Args:
        model_name: name of the network.
        arch_params: arguments of the network.
        num_classes: number of classes.
        strict_load, checkpoint_path, load_backbone, checkpoint_num_classes: see `slipstream.zoo.models.get`.
        pretrained_weights: must be None, except for timm networks; see `slipstream.zoo.models.get`.
        download_required_code: has no effect, because nothing is downloaded.
        num_input_channels: number of image channels. Default: the network's own default, usually 3.
        checkpoint_sha256: the SHA-256 checksum of the checkpoint; SuperGradients does not have this argument.

    Raises:
        UnknownNameError: the network does not exist.
        ConfigError: `load_backbone` is set without a checkpoint. For other errors, see
            `slipstream.zoo.models.get`.
    """
    if load_backbone and not checkpoint_path:
        raise ConfigError("requires checkpoint_path", "load_backbone")
    options = dict(arch_params or {})
    if num_input_channels not in (None, 3):
        options["in_channels"] = num_input_channels
    if model_name not in models.names() and model_name in MODELS:
        network = _build_registered(model_name, options, num_classes)
        if checkpoint_path is not None:
            models.load(
                network, checkpoint_path, strict_load, load_backbone, checkpoint_sha256=checkpoint_sha256
            )
        return network
    return models.get(
        model_name,
        num_classes,
        arch_params=options,
        checkpoint_path=checkpoint_path,
        strict_load=strict_load,
        load_backbone=load_backbone,
        checkpoint_num_classes=checkpoint_num_classes,
        checkpoint_sha256=checkpoint_sha256,
        pretrained_weights=pretrained_weights,
    )


def load_checkpoint_to_model(
    net: nn.Module,
    ckpt_local_path: str | Path,
    load_backbone: bool = False,
    strict: Any = _DEFAULT_STRICT_LOAD,
    load_weights_only: bool = True,
    load_ema_as_net: bool = False,
    load_processing_params: bool = False,
) -> None:
    """Load weights from a file into a network; see `slipstream.zoo.models.load`.

    The last three arguments have no effect: only weights are loaded, and the EMA weights are used if the file contains
    them.
    """
    models.load(net, ckpt_local_path, strict, load_backbone)


def _build_registered(name: str, options: dict[str, Any], num_classes: int | None) -> nn.Module:
    known = inspect.signature(MODELS.resolve(name)).parameters
    if num_classes is not None and "num_classes" in known:
        options["num_classes"] = num_classes
    arguments = {"arch_params": options} if "arch_params" in known else options
    network: nn.Module = MODELS.build({"type": name, **arguments})
    return network
