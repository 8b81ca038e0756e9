"""`training_params.loss` and `criterion_params`: SuperGradients' losses by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.registry import MODELS
from slipstream.training.factories import read_factory
from slipstream.zoo.losses import CrossEntropy, at_least_float32

__all__ = ["CrossEntropyLoss", "loss_config"]

_NAMES = {
    "CrossEntropyLoss": "CrossEntropy",
    "cross_entropy": "CrossEntropy",
    "DiceCEEdgeLoss": "DiceCEEdgeLoss",
    "dice_ce_edge_loss": "DiceCEEdgeLoss",
    "STDCLoss": "STDCLoss",
    "stdc_loss": "STDCLoss",
    "MSE": "MSELoss",
    "mse": "MSELoss",
    "BCEDiceLoss": "BCEDiceLoss",
    "bce_dice_loss": "BCEDiceLoss",
    "FocalLoss": "FocalLoss",
    "ShelfNetOHEMLoss": "ShelfNetOHEMLoss",
    "shelfnet_ohem_loss": "ShelfNetOHEMLoss",
    "KDLogitsLoss": "KDLogitsLoss",
    "kd_loss": "KDLogitsLoss",
    "SegKDLoss": "SegKDLoss",
    "ChannelWiseKnowledgeDistillationLoss": "ChannelWiseKnowledgeDistillationLoss",
}
_NESTED = ("task_loss_fn", "distillation_loss_fn", "kd_loss", "ce_loss", "loss_fcn")
"""Loss arguments whose values are also losses."""

_CONFIG_PATH = "training_params.loss"
_FIXED_ARGUMENTS = {"reduction": "mean", "smooth_dist": None, "from_logits": True}
"""Arguments of `CrossEntropyLoss` that support only one value."""


@MODELS.register_module(name="RecipeCrossEntropy")
class CrossEntropyLoss(CrossEntropy):
    """Cross-entropy with the same arguments and results as in SuperGradients.

    For targets that are class ids, predicted probabilities p, class weights w and e = `smooth_eps`, the loss of a pixel
    with class y is `-(1 - e) * w[y] * log p[y] - e * mean(w * log p)`. With `smooth_eps` and `weight`, the sum over all
    pixels is divided by the number of pixels that are not ignored; without `smooth_eps`, it is divided by the sum of
    their weights. Targets that are class probabilities are not smoothed.

    The results differ in one case: for logits (N, classes, H, W), SuperGradients smooths over W, not over the classes.

    Args:
        weight, ignore_index: see `CrossEntropy`.
        reduction: must be 'mean'.
        smooth_eps: amount of smoothing, from 0 to 1.
        smooth_dist: must be None.
        from_logits: must be True.

    Raises:
        ConfigError: if an argument is out of range or not supported.
    """

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        smooth_eps: float | None = None,
        smooth_dist: None = None,
        from_logits: bool = True,
    ) -> None:
        options = {"reduction": reduction, "smooth_dist": smooth_dist, "from_logits": from_logits}
        for key, supported in _FIXED_ARGUMENTS.items():
            _pop_fixed(options, key, supported)
        super().__init__(ignore_index, smooth_eps or 0.0, weight)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss as a 0-dim tensor; see `CrossEntropy.forward`."""
        smoothing = self.label_smoothing
        if not (smoothing and isinstance(outputs, Tensor)):
            return super().forward(outputs, targets)
        logits = at_least_float32(outputs)
        if targets.is_floating_point():
            return F.cross_entropy(logits, targets, self.weight)
        if self.weight is None:
            return super().forward(outputs, targets)
        log_p = F.log_softmax(logits, dim=1) * self.weight.view(-1, *[1] * (logits.ndim - 2))
        valid = targets != self.ignore_index
        target_log_p = log_p.gather(1, targets.long().where(valid, 0).unsqueeze(1)).squeeze(1)
        losses = -(1 - smoothing) * target_log_p - smoothing * log_p.mean(1)
        return losses.where(valid, 0).sum() / valid.sum().clamp_min(1)


def loss_config(
    loss: Any, criterion_params: Mapping[str, Any] | None = None
) -> dict[str, Any] | Callable[..., Any]:
    """Return a loss configuration for `MODELS`. A module or function is returned unchanged.

    Args:
        loss: a module, a function, a name, `{Name: {arguments}}` or `{_target_: ..., arguments}`. Valid names are
            those of SuperGradients (old and new), `slipstream.zoo` and `torch.nn`.
        criterion_params: arguments of the loss. Arguments in `loss` override them.

    Raises:
        ConfigError: if no loss is set, or an argument is not supported.
        UnknownNameError: if no loss has that name.
    """
    if loss is None:
        raise ConfigError(
            f"a loss is required; use one of {', '.join(sorted(_NAMES))}, or a module (a recipe without a loss is only "
            "a base for other recipes)",
            _CONFIG_PATH,
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
    for key in _NESTED:
        if isinstance(inner := arguments.get(key), str | Mapping):
            arguments[key] = loss_config(inner)
    translate = {"CrossEntropy": _cross_entropy, "DiceCEEdgeLoss": _dice_ce_edge, "STDCLoss": _stdc}.get(
        kind, dict
    )
    return {"type": kind, **translate(arguments)}


def _cross_entropy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(arguments)
    for key, supported in _FIXED_ARGUMENTS.items():
        _pop_fixed(kept, key, supported)
    return {"type": "RecipeCrossEntropy" if "smooth_eps" in kept else "CrossEntropy", **kept}


def _dice_ce_edge(arguments: Mapping[str, Any]) -> dict[str, Any]:
    ignored, classes = arguments.get("ignore_index", -100), arguments.get("num_classes")
    if isinstance(ignored, int) and isinstance(classes, int) and 0 <= ignored < classes:
        raise ConfigError(
            f"is {ignored}, which is one of the {classes} classes. In this case, SuperGradients compares channel c "
            "with class c in the cross-entropy, but with class c + 1 in the Dice loss. This is not supported here. "
            f"Set ignore_index={classes} and use this id for ignored pixels, or pass a "
            "slipstream.zoo.DiceCEEdgeLoss object, which compares channel c with class c in both losses",
            f"{_CONFIG_PATH}.ignore_index",
        )
    return {"type": "DiceCEEdgeLoss", **arguments}


def _stdc(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Slipstream's loss, with SuperGradients' defaults where they differ from Slipstream's."""
    kept = dict(arguments)
    # The kernel receives no gradient, so the value of this argument has no effect.
    kept.pop("learnable_fusing_kernel", None)
    _pop_fixed(kept, "ohem_criteria", None)
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


def _pop_fixed(arguments: dict[str, Any], key: str, supported: Any) -> None:
    """Remove an argument that supports only a single value; raise an error for other values."""
    if (value := arguments.pop(key, supported)) != supported:
        raise ConfigError(
            f"must be {supported!r}, not {value!r}; for other values, use your own loss",
            f"{_CONFIG_PATH}.{key}",
        )
