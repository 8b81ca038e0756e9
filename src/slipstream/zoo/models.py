"""The recipes' networks by name, with weights from a file: `models.get("ddrnet_23", num_classes=19)`."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from slipstream.checkpoint import load_checkpoint, load_weights, revise
from slipstream.errors import CheckpointError, UnknownNameError, did_you_mean
from slipstream.registry import MODELS

__all__ = ["get", "names"]


class _Builder(NamedTuple):
    module: str
    name: str
    backbone: str
    """The part of the network that a backbone's weights are for; all of it where this is empty."""


def _table() -> dict[str, _Builder]:
    families = {
        ("pp_liteseg", "encoder.backbone"): ["pp_lite_t_seg", "pp_lite_b_seg"],
        ("stdc_seg", "cp.backbone"): ["stdc1_seg", "stdc2_seg"],
        ("regseg", "backbone"): ["regseg48"],
        ("ddrnet", ""): ["ddrnet_23", "ddrnet_23_slim", "ddrnet_39"],
        ("segformer", "_backbone"): [f"segformer_b{size}" for size in range(6)],
        ("resnet", ""): ["resnet18", "resnet34", "resnet50"],
    }
    table = {
        name: _Builder(module, name, backbone)
        for (module, backbone), family in families.items()
        for name in family
    }
    # The recipes at half and at three quarters of the images' resolution share one network.
    scaled = {
        f"{name}{percent}": builder
        for name, builder in table.items()
        if builder.module in ("pp_liteseg", "stdc_seg")
        for percent in (50, 75)
    }
    return table | scaled


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted(_table())


def get(
    name: str,
    num_classes: int,
    *,
    checkpoint_path: str | Path | None = None,
    strict_load: bool = True,
    load_backbone: bool = False,
    **options: Any,
) -> nn.Module:
    """Return a network of the recipes, in training mode, with random weights or those of a file.

    Args:
        name: one of `names()`.
        num_classes: classes to predict.
        checkpoint_path: a checkpoint of Slipstream, MMEngine or SuperGradients, or a plain dict of tensors.
            Of SuperGradients' two networks the average (`ema_net`) is taken where there is one.
        strict_load: every weight must match; otherwise those that do not are skipped, and logged.
        load_backbone: the file holds a backbone, such as a classifier trained on ImageNet: it is loaded into that
            part of the network, and what does not match is skipped and logged.
        options: further arguments of the network, such as `use_aux_heads`.

    Raises:
        UnknownNameError: there is no such network.
        BuildError: the network has no such option.
        CheckpointError: the file cannot be read, or belongs to another network.
    """
    table = _table()
    if name not in table:
        raise UnknownNameError(
            f"there is no network '{name}'{did_you_mean(name, table)} (there are: {', '.join(names())})"
        )
    builder = table[name]
    importlib.import_module(f"slipstream.zoo.{builder.module}")
    network: nn.Module = MODELS.build({"type": builder.name, "num_classes": num_classes, **options})
    if checkpoint_path is not None:
        part = network.get_submodule(builder.backbone) if load_backbone else network
        prefix = r"^(module\.)?(backbone\.)?" if load_backbone else r"^module\."
        state = revise(_weights(checkpoint_path), [(prefix, "")])
        lines = load_weights(part, state, strict_load and not load_backbone, str(checkpoint_path))
        for line in lines:
            logging.getLogger("slipstream").warning("%s into %s: %s", checkpoint_path, name, line)
    return network


def _weights(path: str | Path) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(path)
    for key in ("ema_net", "net", "state_dict"):
        if isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    tensors = {key: value for key, value in checkpoint.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no weights: none of its keys {sorted(checkpoint)} is a tensor")
    return tensors
