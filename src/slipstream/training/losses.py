"""SuperGradients' losses by name, and the metrics and losses that a run watches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError, ModelError, SlipstreamError, UnknownNameError, did_you_mean
from slipstream.evaluator.metric import LossMetric
from slipstream.losses import Outputs, Upsampled, at_least_float32, full, supports_low_resolution
from slipstream.registry import METRICS, MODELS
from slipstream.training.metrics import NAMES, known_names
from slipstream.training.params import TrainingParams, pop_fixed, read_factory
from slipstream.zoo.losses import CrossEntropy

# SuperGradients' names for losses whose name in MODELS is different.
_NAMES = {
    "CrossEntropyLoss": "CrossEntropy",
    "cross_entropy": "CrossEntropy",
    "dice_ce_edge_loss": "DiceCEEdgeLoss",
    "stdc_loss": "STDCLoss",
    "MSE": "MSELoss",
    "mse": "MSELoss",
    "bce_dice_loss": "BCEDiceLoss",
    "shelfnet_ohem_loss": "ShelfNetOHEMLoss",
    "kd_loss": "KDLogitsLoss",
}
# Loss arguments whose values are also losses.
_NESTED = ("task_loss_fn", "distillation_loss_fn", "kd_loss", "ce_loss", "loss_fcn")
_CONFIG_PATH = "training_params.loss"
# Arguments of `CrossEntropyLoss` that support only one value.
_FIXED_ARGUMENTS = {"reduction": "mean", "smooth_dist": None, "from_logits": True}
# For each loss class that returns several values, SuperGradients' name for the total.
_TOTALS = {
    "DiceCEEdgeLoss": "loss",
    "KDLogitsLoss": "Loss",
    "STDCLoss": "loss",
    "SegKDLoss": "Total_Loss",
    "ShelfNetOHEMLoss": "Loss",
}
# Key of the losses in a model's predictions.
LOSSES_KEY = "watched_losses"


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
        given = {"reduction": reduction, "smooth_dist": smooth_dist, "from_logits": from_logits}
        pop_fixed(given, _FIXED_ARGUMENTS, _CONFIG_PATH)
        super().__init__(ignore_index, smooth_eps or 0.0, weight)

    @supports_low_resolution
    def forward(self, outputs: Outputs, targets: Tensor) -> Tensor:
        """Return the loss as a 0-dim tensor; see `CrossEntropy.forward`."""
        if targets.is_floating_point() and self.label_smoothing and isinstance(outputs, Tensor | Upsampled):
            return F.cross_entropy(at_least_float32(full(outputs)), targets, self.weight)
        return super().forward(outputs, targets)

    def _divisor(self, targets: Tensor) -> Tensor:
        if self.label_smoothing and self.weight is not None:
            return (targets != self.ignore_index).sum().clamp_min(1)
        return super()._divisor(targets)


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
        raise ConfigError("is required; use a name, such as CrossEntropyLoss, or a module", _CONFIG_PATH)
    if callable(loss):
        if criterion_params:
            raise ConfigError("only applies to a loss given by name", "training_params.criterion_params")
        return loss
    name, own = read_factory(loss, _CONFIG_PATH)
    kind = _NAMES.get(name, name)
    if kind not in MODELS:
        hint = did_you_mean(name, [*_NAMES, *_NAMES.values()])
        raise UnknownNameError(f"no loss is named '{name}'{hint}", _CONFIG_PATH)
    arguments = {**(criterion_params or {}), **own}
    for key in _NESTED:
        if isinstance(inner := arguments.get(key), str | Mapping):
            arguments[key] = loss_config(inner)
    if kind == "CrossEntropy":
        pop_fixed(arguments, _FIXED_ARGUMENTS, _CONFIG_PATH)
        kind = "RecipeCrossEntropy" if "smooth_eps" in arguments else kind
    elif kind == "DiceCEEdgeLoss":
        _check_dice_ce_edge(arguments)
    elif kind == "STDCLoss":
        arguments = _stdc(arguments)
    return {"type": kind, **arguments}


def _check_dice_ce_edge(arguments: Mapping[str, Any]) -> None:
    ignored, classes = arguments.get("ignore_index", -100), arguments.get("num_classes")
    if isinstance(ignored, int) and isinstance(classes, int) and 0 <= ignored < classes:
        raise ConfigError(
            f"is one of the {classes} classes; SuperGradients compares channel c with class c + 1 in the Dice loss; "
            f"set ignore_index={classes} and use this id for ignored pixels",
            f"{_CONFIG_PATH}.ignore_index",
        )


def _stdc(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Slipstream's loss, with SuperGradients' defaults where they differ from Slipstream's."""
    arguments.pop("learnable_fusing_kernel", None)  # has no effect, because the kernel receives no gradient
    pop_fixed(arguments, {"ohem_criteria": None}, _CONFIG_PATH)
    heads = 1 + arguments.pop("num_aux_heads", 2) + arguments.setdefault("num_detail_heads", 1)
    weights = arguments.setdefault("weights", (1.0,) * heads)
    if len(weights) != heads:
        raise ConfigError(f"must be {heads} numbers, one per output", f"{_CONFIG_PATH}.weights")
    arguments.setdefault("mining_percent", 0.1)
    if arguments.setdefault("ignore_index", None) is None:
        arguments["ignore_index"] = -100
    return arguments


# ---- watched metrics and losses ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A metric or loss computed during validation."""

    # Name of the metric or loss in the validation results.
    name: str
    is_loss: bool = False


def watched_value(requested: str, params: TrainingParams, config_path: str) -> Watched:
    """Return the metric or loss with this name, ignoring case and punctuation.

    The name of a loss is that of its class; a component is named `class/component`, and the component name alone is
    also accepted.

    Raises:
        UnknownNameError: if no metric or loss has this name, and no metric object chooses its names at run time.
    """
    groups = [known_names(entry) for entry in params.valid_metrics_list]
    names = [name for group in groups for name in group]
    for name in names:
        if _normalized(name) == _normalized(requested):
            return Watched(name)
    losses = [] if params.loss is None else _loss_names(loss_config(params.loss, params.criterion_params))
    for title in losses:
        if _normalized(requested) in (_normalized(title), _normalized(title.partition("/")[2])):
            return Watched(title, is_loss=True)
    if losses and re.fullmatch(rf"{re.escape(losses[0])}/\w+", requested):
        return Watched(requested, is_loss=True)  # the components are known only after validation
    # The names of some metrics, and of the items of a torchmetrics value, are also known only then.
    if not all(groups) or ("/" in requested and requested.partition("/")[0] in {*names} - NAMES.keys()):
        return Watched(requested)
    raise _unknown(requested, "metric in valid_metrics_list and no loss", [*names, *losses], config_path)


def train_metric(requested: str, params: TrainingParams, config_path: str) -> str:
    """Return the name, with the `train/` prefix, of a metric in `train_metrics_list`, ignoring case and punctuation.

    Raises:
        UnknownNameError: if no training metric has this name, and none chooses its names at run time.
    """
    groups = [known_names(entry) for entry in params.train_metrics_list]
    names = [name for group in groups for name in group]
    found = [name for name in names if _normalized(name) == _normalized(requested)]
    if not found and all(groups):
        raise _unknown(requested, "metric in train_metrics_list", names, config_path)
    return f"train/{found[0] if found else requested}"


def _unknown(requested: str, kind: str, names: Iterable[str], config_path: str) -> UnknownNameError:
    hint, available = did_you_mean(requested, names), ", ".join(names) or "none"
    return UnknownNameError(f"no {kind} is named '{requested}'{hint} (available: {available})", config_path)


def loss_value(loss: Any, result: Any, title: str) -> Tensor:
    """Return the total or the component named `title` from the result of a loss.

    Args:
        loss: the loss, a module or a function.
        result: a scalar, a dict of scalars, or SuperGradients' pair (scalar, values to log).
        title: see `watched_value`.

    Raises:
        ModelError: if the loss has no such component.
    """
    component, total = title.partition("/")[2], result
    values: dict[str, Tensor] = {}
    if isinstance(result, tuple):
        total, items = result
        names = getattr(loss, "component_names", None) or [f"loss_{index}" for index in range(len(items))]
        values = dict(zip(names, items, strict=False))
    elif isinstance(result, Mapping):
        values = dict(result)
        total = torch.stack([value for name, value in result.items() if "loss" in name]).sum()
    if component in ("", _TOTALS.get(type(loss).__name__)):
        values.setdefault(component, total)
    if component not in values:
        raise ModelError(f"in validation, the loss has no component '{component}' (available: {[*values]})")
    return values[component].detach()


@METRICS.register_module()
class ValidationLoss(LossMetric):
    """Average, over all samples, the losses that a `SupervisedModel` returns with its predictions.

    Args:
        names: names of the losses; see `watched_value`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Store the losses of a batch without copying them from the device, and the number of samples in the batch."""
        losses = {name: data_samples[LOSSES_KEY][name] for name in self.names}
        super().process(data_batch, (losses, len(data_samples["targets"])))


def _loss_names(loss: Mapping[str, Any] | Callable[..., Any]) -> list[str]:
    """Return the names of a loss: its class, and the components that it declares."""
    try:
        built: Any = MODELS.build(loss) if isinstance(loss, Mapping) else loss
    except SlipstreamError:  # the Runner raises this error again, with the config path
        return []
    own = getattr(built, "__name__", type(built).__name__)
    components = getattr(built, "component_names", None) or ([_TOTALS[own]] if own in _TOTALS else [])
    name = "CrossEntropyLoss" if own == "CrossEntropy" else own
    return [name, *(f"{name}/{component}" for component in components)]


def _normalized(name: str) -> str:
    """Return the name in lower case without punctuation; `pixel_accuracy` and `PixelAccuracy` are the same metric."""
    return "".join(filter(str.isalnum, name)).lower()
