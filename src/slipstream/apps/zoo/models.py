"""The recipes' networks by name, with weights from a file: `models.get("ddrnet_23", num_classes=19)`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slipstream.checkpoint import load_checkpoint, load_weights, revise
from slipstream.errors import CheckpointError, ConfigError, ModelError, UnknownNameError, did_you_mean
from slipstream.logging import print_log
from slipstream.registry import MODELS

__all__ = ["get", "load", "names"]

_BACKBONES = {
    "PPLiteSeg": "encoder.backbone",
    "STDCSeg": "cp.backbone",
    "RegSeg": "backbone",
    "DDRNet": "",
    "SegFormer": "_backbone",
    "ResNet": "",
}
"""The part of a network that a backbone's weights are for, by its class; all of it where this is empty."""

_SAID_ELSEWHERE = {
    "aux_head": "use_aux_heads",
    "dropout_prob": "dropout",
    "drop_path_prob": "drop_path",
    "sync_bn": "training_params.sync_bn",
}
"""What SuperGradients' recipes have written over the years for what has another name or place."""


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    scaled = ["pp_lite_t_seg", "pp_lite_b_seg", "stdc1_seg", "stdc2_seg"]
    # The recipes at half and at three quarters of the images' resolution share one network.
    known = [f"{name}{percent}" for name in scaled for percent in ("", 50, 75)]
    known += ["regseg48", "ddrnet_23", "ddrnet_23_slim", "ddrnet_39"]
    known += [f"segformer_b{size}" for size in range(6)]
    return sorted([*known, "resnet18", "resnet18_cifar", "resnet34", "resnet50"])


def get(
    name: str,
    num_classes: int | None = None,
    *,
    arch_params: Mapping[str, Any] | None = None,
    checkpoint_path: str | Path | None = None,
    strict_load: Any = True,
    load_backbone: bool = False,
    checkpoint_num_classes: int | None = None,
    pretrained_weights: str | None = None,
    **options: Any,
) -> nn.Module:
    """Return a network of the recipes, in training mode, with random weights or those of a file.

    Args:
        name: one of `names()`.
        num_classes: classes to predict; `arch_params` may hold them instead.
        arch_params: as `options`.
        checkpoint_path: a checkpoint of Slipstream, MMEngine or SuperGradients, or a plain dict of tensors; see `load`.
        strict_load, load_backbone: as in `load`.
        checkpoint_num_classes: classes of the file's network; where they differ from `num_classes`, its last layers
            are skipped, and logged.
        pretrained_weights: only None: nothing is downloaded.
        options: further arguments of the network, such as `use_aux_heads`.

    Raises:
        UnknownNameError: there is no such network.
        BuildError: the network has no such option.
        ConfigError: no number of classes, or two; or weights to be downloaded.
        CheckpointError: the file cannot be read, or belongs to another network.
    """
    if name not in (known := names()):
        raise UnknownNameError(
            f"there is no network '{name}'{did_you_mean(name, known)} (there are: {', '.join(known)})"
        )
    if pretrained_weights is not None:
        raise ConfigError(
            f"nothing is downloaded: fetch the weights of '{pretrained_weights}' yourself and give their file as "
            "checkpoint_path (and load_backbone=True if they are a backbone's)",
            "pretrained_weights",
        )
    options = {**(arch_params or {}), **options}
    given = options.pop("num_classes", None)
    if num_classes is None and given is None:
        raise ConfigError(f"'{name}' needs a number of classes", "num_classes")
    if None not in (num_classes, given) and num_classes != given:
        raise ConfigError(f"is {num_classes}, and {given} in arch_params: give one of them", "num_classes")
    classes: int = num_classes if num_classes is not None else given
    for word in _SAID_ELSEWHERE.keys() & options.keys():
        raise ConfigError(f"is {_SAID_ELSEWHERE[word]} here", f"arch_params.{word}")
    network: nn.Module = MODELS.build({"type": name, "num_classes": classes, **options})
    if checkpoint_path is not None:
        if checkpoint_num_classes not in (None, classes):
            strict_load = False
        load(network, checkpoint_path, strict_load, load_backbone)
    return network


def load(
    network: nn.Module, checkpoint_path: str | Path, strict_load: Any = True, load_backbone: bool = False
) -> None:
    """Load the weights of a file into a network, and log what was skipped.

    Of a checkpoint that a `SupervisedModel` wrote, its network is taken; of SuperGradients' two networks the average
    (`ema_net`) where there is one. What DDP (`module.`) and `torch.compile` (`_orig_mod.`) put before names is dropped.

    Args:
        network: the bare network.
        checkpoint_path: as in `get`.
        strict_load: True: every weight must match. False: those that do not are skipped. `'no_key_matching'`: where the
            names differ, weights are taken in their order, and each must have the shape of its counterpart.
            SuperGradients' `StrictLoad`, and its recipes' dict with a `value`, stand for their value.
        load_backbone: the file holds a backbone, such as a classifier trained on ImageNet: it is loaded into that
            part of the network, and what does not match is skipped.

    Raises:
        ConfigError: an unknown `strict_load`.
        ModelError: the network has no backbone.
        CheckpointError: the file cannot be read, or belongs to another network.
    """
    strict = _strictness(strict_load)
    place = _backbone(network) if load_backbone else ""
    part = network.get_submodule(place)
    state = _weights(checkpoint_path)
    if any(key.startswith("network.") for key in state):
        state = {key: value for key, value in state.items() if key.startswith("network.")}
    inner = rf"({re.escape(place)}\.|backbone\.)?" if load_backbone else ""
    state = revise(state, [(r"^(network\.)?((module|_orig_mod)\.)*" + inner, "")])
    own = part.state_dict()
    matching = bool(state.keys() & own.keys()) if load_backbone else state.keys() == own.keys()
    if strict == "no_key_matching" and not matching:
        state = _in_order(own, state, load_backbone, checkpoint_path)
    loose = load_backbone or strict is False
    for line in load_weights(part, state, not loose, str(checkpoint_path)):
        print_log(f"{checkpoint_path} into {type(network).__name__}: {line}", "current", logging.WARNING)


def _strictness(value: Any) -> bool | str:
    plain = value.get("value") if isinstance(value, Mapping) else getattr(value, "value", value)
    if plain == "key_matching":  # SuperGradients' word for skipping what does not match
        return False
    if plain is None or isinstance(plain, bool) or plain == "no_key_matching":
        return True if plain is None else plain
    raise ConfigError(
        f"must be True, False, 'no_key_matching' or 'key_matching', not {value!r}",
        "checkpoint_params.strict_load",
    )


def _backbone(network: nn.Module) -> str:
    place = _BACKBONES.get(type(network).__name__, "backbone")
    if place == "backbone" and not isinstance(getattr(network, place, None), nn.Module):
        raise ModelError(
            f"{type(network).__name__} has no part named 'backbone' that load_backbone could load weights into"
        )
    return place


def _in_order(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], may_end_earlier: bool, source: str | Path
) -> dict[str, Tensor]:
    """Return the weights under the network's names, given in the same order; a backbone's classifier may follow."""
    if len(state) < len(own) or (len(state) > len(own) and not may_end_earlier):
        raise CheckpointError(
            f"{source} belongs to another model: it holds {len(state)} tensors, the model {len(own)}, so they cannot "
            "be matched by their order"
        )
    for (theirs, value), (mine, wanted) in zip(state.items(), own.items(), strict=False):
        if value.shape != wanted.shape:
            raise CheckpointError(
                f"{source} belongs to another model: by their order, {theirs} is {mine}, but they are "
                f"{tuple(value.shape)} and {tuple(wanted.shape)}"
            )
    rest = dict(list(state.items())[len(own) :])
    return {**dict(zip(own, state.values(), strict=False)), **rest}


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
