"""Create networks by name, optionally with weights from a file: `models.get("ddrnet_23", num_classes=19)`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from inspect import isfunction
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slipstream.checkpoint import (
    load_checkpoint,
    load_weights,
    local_checkpoint,
    redacted_source,
    revise,
    weights_in,
)  # fmt: skip
from slipstream.errors import (
    CheckpointError,
    ConfigError,
    MissingPackageError,
    ModelError,
    UnknownNameError,
    did_you_mean,
)  # fmt: skip
from slipstream.logging import print_log
from slipstream.model.weight_init import load_pretrained
from slipstream.registry import MODELS
from slipstream.zoo.network import Network
from slipstream.zoo.timm_networks import PREFIX, LibraryNetwork, add_prefix, import_timm

# Name of the submodule that receives backbone weights, by network class; empty for the whole network.
_BACKBONES = {
    "PPLiteSeg": "encoder.backbone",
    "STDCSeg": "cp.backbone",
    "RegSeg": "backbone",
    "DDRNet": "",
    "SegFormer": "_backbone",
    "ResNet": "",
    "TimmClassifier": "model",
    "SmpSegmentor": "model.encoder",
    "UNet": "encoder",
}

_ZOO = f"{__package__}."
# Prefixes of the names of other libraries' networks, and the classes of these networks.
LIBRARIES = {PREFIX: "TimmClassifier", "smp:": "SmpSegmentor"}
_OTHER_NETWORKS = (
    f"other classification networks come from timm, under the name {PREFIX}NAME, and segmentation networks from "
    "segmentation_models_pytorch, under the name smp:NAME"
)


def names() -> list[str]:
    """Return the sorted names that `get` accepts, except those of other libraries' networks."""
    # The networks are registered functions. The losses and the dataset of the zoo are classes.
    return sorted(n for n, f in MODELS.module_dict.items() if isfunction(f) and f.__module__.startswith(_ZOO))


def get(
    name: str,
    num_classes: int | None = None,
    *,
    arch_params: Mapping[str, Any] | None = None,
    checkpoint_path: str | Path | None = None,
    strict_load: Any = True,
    load_backbone: bool = False,
    checkpoint_num_classes: int | None = None,
    checkpoint_sha256: str | None = None,
    pretrained_weights: str | None = None,
    **options: Any,
) -> nn.Module:
    """Return a network in training mode, with randomly initialized or pretrained weights.

    Args:
        name: one of `names()`, or `timm:` followed by timm's name for a classification network
            (`timm:convnext_tiny`), or `smp:` followed by a name from segmentation_models_pytorch (`smp:unet`).
        num_classes: number of classes. Can also be set in `arch_params`.
        arch_params: arguments for the network. `options` take precedence over these arguments.
        checkpoint_path: a checkpoint from Slipstream, MMEngine or SuperGradients, or a plain state dict; see `load`.
        strict_load, load_backbone, checkpoint_sha256: see `load`.
        checkpoint_num_classes: number of classes in the checkpoint. If it differs from `num_classes`, the
            classification layers are not loaded, and a message is logged.
        pretrained_weights: must be None, except for networks from other libraries, for which any string selects the
            library's weights.
        options: additional arguments for the network, such as `use_aux_heads`; see `network_config`.

    Raises:
        UnknownNameError: if the network does not exist.
        BuildError: if the network does not accept an option.
        ConfigError: if the number of classes is missing or ambiguous, an option has been renamed, or
            `pretrained_weights` is set for one of Slipstream's networks.
        CheckpointError: if the file cannot be read or belongs to a different network.
    """
    _check_name(name, pretrained_weights)
    options = {**(arch_params or {}), **options}
    classes = _classes(name, num_classes, options.pop("num_classes", None))
    if pretrained_weights is not None:
        options["pretrained"] = True
    network: nn.Module = MODELS.build(network_config(name, {"num_classes": classes, **options}))
    load_pretrained(network)
    if checkpoint_path is not None:
        load(
            network,
            checkpoint_path,
            strict_load,
            load_backbone,
            other_classes=checkpoint_num_classes not in (None, classes),
            checkpoint_sha256=checkpoint_sha256,
        )
    return network


def _check_name(name: str, pretrained_weights: str | None) -> None:
    if name.startswith(tuple(LIBRARIES)):
        return
    if name not in names():
        raise UnknownNameError(unknown_network(name))
    if pretrained_weights is not None:
        raise ConfigError(missing_weights(pretrained_weights), "pretrained_weights")


def unknown_network(name: str) -> str:
    """Return the error message for an unknown network, which suggests the nearest name."""
    known = names()
    return f"no network is named '{name}'{network_hint(name, known)} (available: {', '.join(known)}; {_OTHER_NETWORKS})"


def network_hint(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest network in `known` or, if it is installed, in timm."""
    if hint := did_you_mean(name, known):
        return hint
    try:
        return did_you_mean(f"{PREFIX}{name}", [f"{PREFIX}{other}" for other in import_timm().list_models()])
    except MissingPackageError:
        return ""


def missing_weights(name: str) -> str:
    """Return the error message for pretrained weights that are requested by name, such as `cityscapes`."""
    return (
        f"weights are not downloaded by name ('{name}'); set checkpoint_path to a file or to a URL such as "
        "hf://ORG/REPO/FILE, and optionally checkpoint_sha256 to the file's SHA-256 checksum (if the checkpoint has a "
        "different number of classes, also set checkpoint_num_classes; if it contains only a backbone, also set "
        "load_backbone=True)"
    )


def _classes(name: str, num_classes: int | None, arch_classes: int | None) -> int:
    if num_classes is None and arch_classes is None:
        raise ConfigError(
            f"is required for '{name}'; set it to the dataset's number of classes", "num_classes"
        )
    if None not in (num_classes, arch_classes) and num_classes != arch_classes:
        raise ConfigError(
            f"is {num_classes}, but arch_params sets {arch_classes}; set only one of the two", "num_classes"
        )
    return num_classes if num_classes is not None else arch_classes  # type: ignore[return-value]


def network_config(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a network for `MODELS.build`; `name` may start with `timm:` or `smp:`.

    As in SuperGradients, DDRNet and PP-LiteSeg have auxiliary heads only if `use_aux_heads` is True.
    """
    for prefix, kind in LIBRARIES.items():
        if name.startswith(prefix):
            return {"type": kind, "name": name.removeprefix(prefix), **options}
    heads = {"use_aux_heads": False} if name in names() and name.startswith(("ddrnet", "pp_lite")) else {}
    return {"type": name, **heads, **options}


def load(
    network: nn.Module,
    checkpoint_path: str | Path,
    strict_load: Any = True,
    load_backbone: bool = False,
    other_classes: bool = False,
    checkpoint_sha256: str | None = None,
) -> None:
    """Load weights from a file into a network, and log which weights are skipped.

    If the checkpoint contains a `SupervisedModel`, only its network is loaded. From a SuperGradients checkpoint,
    `ema_net` is loaded if it exists, otherwise `net`. The name prefixes added by DDP (`module.`) and `torch.compile`
    (`_orig_mod.`) are removed.

    Args:
        network: the unwrapped network.
        checkpoint_path: a file, a folder or a URL; see `slipstream.checkpoint.local_checkpoint`.
        strict_load: if True, all names and shapes must match. If False, mismatches are skipped. If `'no_key_matching'`
            and the names differ, weights are matched by order, and shapes must match. SuperGradients' `StrictLoad` and
            the dicts with a `value` key in SuperGradients' recipes are also accepted.
        load_backbone: whether to load the file into the network's backbone and skip mismatches, for example if the file
            contains a classifier trained on ImageNet.
        other_classes: whether the checkpoint has a different number of classes. If True, tensors with different shapes
            (those of the classification layers) are skipped.
        checkpoint_sha256: the SHA-256 checksum of the file.

    Raises:
        ConfigError: if `strict_load` or `checkpoint_sha256` is invalid.
        ModelError: if the network has no backbone.
        CheckpointError: if the file cannot be downloaded or read, has a different checksum, or belongs to a
            different network.
    """
    strict = _strictness(strict_load)
    path = _backbone_path(network) if load_backbone else ""
    part = network.get_submodule(path)
    with local_checkpoint(checkpoint_path, checkpoint_sha256) as file:
        checkpoint = load_checkpoint(file)
    source = redacted_source(checkpoint_path)
    weights = weights_in(checkpoint, source)
    state = {key: value for key, value in weights.items() if isinstance(value, Tensor)}
    if any(key.startswith("network.") for key in state):
        state = {key: value for key, value in state.items() if key.startswith("network.")}
    inner = rf"({re.escape(path)}\.|{path.rpartition('.')[2]}\.|backbone\.)?" if load_backbone else ""
    state = revise(state, [(r"^(network\.)?((module|_orig_mod)\.)*" + inner, "")])
    if isinstance(part, LibraryNetwork):
        add_prefix(part, state, "")  # the shapes are compared by name
    own = part.state_dict()
    matching = bool(state.keys() & own.keys()) if load_backbone else state.keys() == own.keys()
    if strict == "no_key_matching" and not matching:
        state = _in_order(own, state, load_backbone, other_classes, source)
    loose = load_backbone or other_classes or strict is False
    for line in load_weights(part, state, not loose, source):
        print_log(f"loading {source} into {type(network).__name__}: {line}", "current", logging.WARNING)
    if isinstance(network, Network) and not (load_backbone or other_classes):
        network.set_processing_from_checkpoint(checkpoint.get("meta"))


def _strictness(value: Any) -> bool | str:
    plain = value.get("value") if isinstance(value, Mapping) else getattr(value, "value", value)
    if plain == "key_matching":  # SuperGradients' name for skipping mismatches
        return False
    if plain is None or isinstance(plain, bool) or plain == "no_key_matching":
        return True if plain is None else plain
    raise ConfigError(
        f"must be True, False, 'no_key_matching' or 'key_matching', not {value!r}",
        "checkpoint_params.strict_load",
    )


def _backbone_path(network: nn.Module) -> str:
    path = _BACKBONES.get(type(network).__name__, "backbone")
    if path == "backbone" and not isinstance(getattr(network, path, None), nn.Module):
        raise ModelError(
            f"load_backbone requires a submodule 'backbone', but {type(network).__name__} has none; "
            "remove load_backbone"
        )
    return path


def _in_order(
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    allow_extra: bool,
    other_classes: bool,
    source: str,
) -> dict[str, Tensor]:
    """Return the weights under the network's names, matched by order, followed by any remaining weights."""
    if len(state) < len(own) or (len(state) > len(own) and not allow_extra):
        raise CheckpointError(
            f"{source} belongs to a different model: it contains {len(state)} tensor{'s' * (len(state) != 1)}, but the "
            f"model has {len(own)}, so they cannot be matched by order. Use a checkpoint from this network"
        )
    for (key, value), (own_key, own_value) in zip(state.items(), own.items(), strict=False):
        # The first dimension of a classification layer is the number of classes, which may differ.
        if value.shape[1:] != own_value.shape[1:] if other_classes else value.shape != own_value.shape:
            raise CheckpointError(
                f"{source} belongs to a different model: {key} and {own_key} are at the same position, but their "
                f"shapes are {tuple(value.shape)} and {tuple(own_value.shape)}. Use a checkpoint from this network"
            )
    rest = dict(list(state.items())[len(own) :])
    return {**dict(zip(own, state.values(), strict=False)), **rest}
