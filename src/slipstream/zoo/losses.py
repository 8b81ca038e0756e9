"""Cross-entropy losses without device synchronization. If all targets are ignored, the loss is 0, not NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError, ModelError
from slipstream.losses import (
    Outputs,
    Upsampled,
    all_heads,
    at_least_float32,
    cross_entropy,
    full,
    supports_low_resolution,
)
from slipstream.registry import MODELS
from slipstream.typecheck import Probability, check

# Default factor of each auxiliary output.
_AUXILIARY_FACTOR = 0.4


@MODELS.register_module()
class CrossEntropy(nn.Module):
    """Cross-entropy over images or pixels, like `nn.CrossEntropyLoss`, but without NaN if all targets are ignored.

    If all targets are ignored, the loss and its gradient are 0. Half-precision logits are converted to float32.

    Args:
        ignore_index: target value to ignore.
        label_smoothing: amount of smoothing, between 0 and 1 (arXiv 1512.00567).
        weight: weight of each class. If the targets are class ids, the weighted sum of the losses is divided by the sum
            of the targets' weights.

    Raises:
        ConfigError: if `label_smoothing` is out of range.
    """

    takes_class_ids = True

    weight: Tensor | None

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, weight: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = check(label_smoothing, Probability, "label_smoothing")
        self.register_buffer("weight", _class_weights(weight), persistent=False)

    @supports_low_resolution
    def forward(self, outputs: Outputs, targets: Tensor) -> Tensor:
        """Return the loss as a 0-dim tensor.

        Args:
            outputs: logits (N, classes) or (N, classes, H, W).
            targets: class ids (N,) or (N, H, W) of any integer dtype, or class probabilities with the shape of the
                logits, in which case no target is ignored.

        Raises:
            ModelError: if the network returns several outputs.
        """
        if not isinstance(outputs, Tensor | Upsampled):
            raise ModelError(
                f"CrossEntropy requires a single output, but the network returns {len(outputs)} in training mode; "
                "disable its auxiliary heads (use_aux_heads=False), or use a loss for several heads (DiceCEEdgeLoss)"
            )
        smoothing = self.label_smoothing
        if targets.is_floating_point():
            logits = at_least_float32(full(outputs))
            return F.cross_entropy(logits, targets, self.weight, label_smoothing=smoothing)
        total = cross_entropy(outputs, targets, self.weight, smoothing, self.ignore_index).sum()
        return total / self._divisor(targets)

    def _divisor(self, targets: Tensor) -> Tensor:
        return _sum_of_weights(targets, self.ignore_index, self.weight)


@MODELS.register_module()
class MultiHeadCrossEntropy(nn.Module):
    """The weighted sum, over a network's outputs, of the mean cross-entropy over the pixels that are not ignored.

    If all pixels of a batch are ignored, the loss and its gradient are 0, whereas `nn.CrossEntropyLoss` returns
    NaN. Half-precision logits are converted to float32.

    Args:
        weights: one factor for each output of the network, in the order of the outputs: the main output first, then the
            auxiliary outputs. Default: 1 for the main output, and 0.4 for each auxiliary output.
        ignore_index: target value of ignored pixels.
        weight: weight of each class, as in `CrossEntropy`; it applies to every output.
    """

    takes_class_ids = True

    weight: Tensor | None

    def __init__(
        self,
        weights: Sequence[float] | None = None,
        ignore_index: int = 255,
        weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.weights = None if weights is None else tuple(weights)
        self.ignore_index = ignore_index
        self.register_buffer("weight", _class_weights(weight), persistent=False)

    @supports_low_resolution
    def forward(self, outputs: Outputs | tuple[Outputs, ...], targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_main": ..., "loss_aux0": ..., ...}`, 0-dim tensors whose sum is the loss.

        Args:
            outputs: logits (N, classes, H, W), or a tuple of them with the main output first.
            targets: class ids (N, H, W) of any integer dtype.

        Raises:
            ModelError: if the number of outputs is not the number of `weights`. In evaluation mode, the main output
                alone is also valid.
        """
        heads = all_heads(outputs)
        factors = self._factors(len(heads))
        divisor = _sum_of_weights(targets, self.ignore_index, self.weight)
        losses = [
            factor * cross_entropy(logits, targets, self.weight, 0.0, self.ignore_index).sum() / divisor
            for factor, logits in zip(factors, heads, strict=True)
        ]
        names = ["loss_main", *(f"loss_aux{index}" for index in range(len(losses) - 1))]
        return dict(zip(names, losses, strict=True))

    def _factors(self, num_outputs: int) -> tuple[float, ...]:
        """Return one factor for each output."""
        if self.weights is None:
            return (1.0, *[_AUXILIARY_FACTOR] * (num_outputs - 1))
        if num_outputs == 1 and self.weights and not self.training:
            return self.weights[:1]
        if len(self.weights) != num_outputs:
            raise ModelError(
                f"MultiHeadCrossEntropy requires one factor in `weights` per network output ({num_outputs}), but "
                f"`weights` has {len(self.weights)}; set `weights` to one factor per output, starting with the main "
                "output (class weights are set with `weight`)"
            )
        return self.weights


def _class_weights(weight: Sequence[float] | None) -> Tensor | None:
    if weight is None:
        return None
    values = torch.as_tensor(weight, dtype=torch.float32)
    if not (values.isfinite() & (values >= 0)).all() or not values.any():
        raise ConfigError(
            f"must contain non-negative numbers, at least one of them positive, not {weight}", "weight"
        )
    return values


def _sum_of_weights(targets: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """Return the sum of the class weights over the targets that are not ignored, or 1 if the sum is 0."""
    targets = targets.long()
    valid = targets != ignore_index
    if weight is None:
        return valid.sum().clamp_min(1)
    total = (weight[targets.where(valid, 0)] * valid).sum()
    return total.where(total > 0, 1)
