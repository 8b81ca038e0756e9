"""`training_params.loss` and `criterion_params`: SuperGradients' losses by its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.registry import MODELS
from slipstream.training.factories import read_factory

__all__ = ["loss_config"]

_NAMES = {
    "CrossEntropyLoss": "CrossEntropy",
    "cross_entropy": "CrossEntropy",
    "DiceCEEdgeLoss": "DiceCEEdgeLoss",
    "dice_ce_edge_loss": "DiceCEEdgeLoss",
    "STDCLoss": "STDCLoss",
    "stdc_loss": "STDCLoss",
    "mse": "MSELoss",
}

_PLACE = "training_params.loss"


def loss_config(
    loss: Any, criterion_params: Mapping[str, Any] | None = None
) -> dict[str, Any] | Callable[..., Any]:
    """Return the configuration of a loss for `MODELS`; a module or function is returned as it is.

    Args:
        loss: a module or function; or a name, `{Name: {arguments}}` or `{_target_: ..., arguments}`. Names are
            SuperGradients', old and new, those of `slipstream.apps.zoo` and of `torch.nn`.
        criterion_params: arguments of the loss; those that stand beside its name prevail.

    Raises:
        ConfigError: there is no loss; or an argument that cannot be honoured.
        UnknownNameError: no loss has that name.
    """
    if loss is None:
        raise ConfigError(f"a loss is needed: one of {', '.join(sorted(_NAMES))}, or a module", _PLACE)
    if not isinstance(loss, str | Mapping):
        if not callable(loss):
            raise ConfigError(f"must be a name, a dict, a module or a function, not {loss!r}", _PLACE)
        if criterion_params:
            raise ConfigError(
                "belong to a loss that is named, and this one is made already", "criterion_params"
            )
        made: Callable[..., Any] = loss
        return made
    name, own = read_factory(loss, _PLACE)
    kind = _NAMES.get(name, name)
    if kind not in MODELS:
        raise UnknownNameError(f"there is no loss '{name}'{did_you_mean(name, _NAMES)}", _PLACE)
    arguments = {**(criterion_params or {}), **own}
    translate = {"CrossEntropy": _cross_entropy, "STDCLoss": _stdc}.get(kind, dict)
    return {"type": kind, **translate(arguments)}


def _cross_entropy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(arguments)
    if "smooth_eps" in kept:
        kept["label_smoothing"] = kept.pop("smooth_eps") or 0.0
    for key, only in (("reduction", "mean"), ("smooth_dist", None), ("from_logits", True)):
        _accept(kept, key, only)
    return kept


def _stdc(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of our loss, with SuperGradients' defaults where they differ from ours."""
    kept = dict(arguments)
    # No gradient reaches the kernel, so that whether it is trained makes no difference.
    kept.pop("learnable_fusing_kernel", None)
    _accept(kept, "ohem_criteria", None)
    auxiliary, details = kept.pop("num_aux_heads", 2), kept.setdefault("num_detail_heads", 1)
    heads = 1 + auxiliary + details
    weights = kept.setdefault("weights", (1.0,) * heads)
    if len(weights) != heads:
        raise ConfigError(
            f"must be {heads} numbers, for the main output, {auxiliary} auxiliary ones and {details} details, not "
            f"{list(weights)}",
            f"{_PLACE}.weights",
        )
    kept.setdefault("mining_percent", 0.1)
    if kept.setdefault("ignore_index", None) is None:
        kept["ignore_index"] = -100
    return kept


def _accept(arguments: dict[str, Any], key: str, only: Any) -> None:
    """Take away an argument that may only have one value."""
    if (value := arguments.pop(key, only)) != only:
        raise ConfigError(
            f"can only be {only!r} here, not {value!r}: give a loss of your own", f"{_PLACE}.{key}"
        )
