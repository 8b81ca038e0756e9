"""`training_params.loss` and `criterion_params`: SuperGradients' losses by name."""

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

_CONFIG_PATH = "training_params.loss"


def loss_config(
    loss: Any, criterion_params: Mapping[str, Any] | None = None
) -> dict[str, Any] | Callable[..., Any]:
    """Return the configuration of a loss for `MODELS`. A module or function is returned unchanged.

    Args:
        loss: a module or function; or a name, `{Name: {arguments}}` or `{_target_: ..., arguments}`. Names are those
            of SuperGradients (old and new), `slipstream.apps.zoo` and `torch.nn`.
        criterion_params: arguments of the loss. Arguments in `loss` override them.

    Raises:
        ConfigError: if no loss is set, or an argument is not supported.
        UnknownNameError: if no loss has that name.
    """
    if loss is None:
        raise ConfigError(
            f"a loss is required: one of {', '.join(sorted(_NAMES))}, or a module", _CONFIG_PATH
        )
    if not isinstance(loss, str | Mapping):
        if not callable(loss):
            raise ConfigError(f"must be a name, a dict, a module or a function, not {loss!r}", _CONFIG_PATH)
        if criterion_params:
            raise ConfigError(
                "only applies to a loss given by name; pass the arguments to the loss object",
                "criterion_params",
            )
        built: Callable[..., Any] = loss
        return built
    name, own = read_factory(loss, _CONFIG_PATH)
    kind = _NAMES.get(name, name)
    if kind not in MODELS:
        raise UnknownNameError(f"no loss is named '{name}'{did_you_mean(name, _NAMES)}", _CONFIG_PATH)
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
    """Return the arguments of our loss, with SuperGradients' defaults where they differ."""
    kept = dict(arguments)
    # The kernel receives no gradient, so the value of this argument has no effect.
    kept.pop("learnable_fusing_kernel", None)
    _accept(kept, "ohem_criteria", None)
    auxiliary, details = kept.pop("num_aux_heads", 2), kept.setdefault("num_detail_heads", 1)
    heads = 1 + auxiliary + details
    weights = kept.setdefault("weights", (1.0,) * heads)
    if len(weights) != heads:
        raise ConfigError(
            f"must be {heads} numbers, for the main output, {auxiliary} auxiliary outputs and {details} detail "
            f"outputs, not {list(weights)}",
            f"{_CONFIG_PATH}.weights",
        )
    kept.setdefault("mining_percent", 0.1)
    if kept.setdefault("ignore_index", None) is None:
        kept["ignore_index"] = -100
    return kept


def _accept(arguments: dict[str, Any], key: str, only: Any) -> None:
    """Remove an argument that supports only a single value; raise an error for other values."""
    if (value := arguments.pop(key, only)) != only:
        raise ConfigError(
            f"must be {only!r}, not {value!r}; use your own loss for other values", f"{_CONFIG_PATH}.{key}"
        )
