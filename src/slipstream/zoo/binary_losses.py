"""SuperGradients' losses for networks with one output channel: BCE plus Dice, and focal loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError, ModelError
from slipstream.losses import at_least_float32
from slipstream.registry import MODELS
from slipstream.typecheck import check

_SMOOTH = 1.0
_EPS = 1e-5


@MODELS.register_module()
class BCEDiceLoss(nn.Module):
    """The weighted sum of binary cross-entropy and 1 - Dice, for binary masks.

    For probabilities p and targets t, `Dice = (2 sum(p t) + 1) / (sum(p) + sum(t) + 1 + 1e-5)`, with sums over all
    pixels of the batch (arXiv 1606.04797). The cross-entropy is the mean over all pixels. Half-precision logits are
    converted to float32.

    Args:
        loss_weights: weights of cross-entropy and 1 - Dice, in this order.
        logits: whether Dice applies the sigmoid to the network's output. As in SuperGradients, the cross-entropy
            always applies the sigmoid.

    Raises:
        ConfigError: if `loss_weights` does not contain two numbers.
    """

    def __init__(self, loss_weights: Sequence[float] = (0.5, 0.5), logits: bool = True) -> None:
        super().__init__()
        self.loss_weights = tuple(check(loss_weights, tuple[float, float], "loss_weights"))
        self.logits = logits

    def forward(self, outputs: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """Return the loss as a 0-dim tensor.

        Args:
            outputs: logits (N, 1, H, W).
            targets: binary masks (N, H, W) with the values 0 and 1, of any dtype.

        Raises:
            ModelError: if the network returns several outputs, or an output with several channels.
        """
        scores = at_least_float32(_one_channel(outputs, type(self).__name__))
        truth = targets.to(scores.dtype)
        probabilities = scores.sigmoid() if self.logits else scores
        overlap = (2 * (probabilities * truth).sum() + _SMOOTH) / (
            probabilities.sum() + truth.sum() + _SMOOTH + _EPS
        )
        cross_entropy, dice = self.loss_weights
        return cross_entropy * F.binary_cross_entropy_with_logits(scores, truth) + dice * (1 - overlap)


@MODELS.register_module()
class FocalLoss(nn.Module):
    """Binary cross-entropy with a smaller weight for well-classified elements (arXiv 1708.02002).

    For the predicted probability p and the target t, let `p_t = t p + (1 - t)(1 - p)` and
    `alpha_t = t alpha + (1 - t)(1 - alpha)`. The loss of an element is `alpha_t (1 - p_t)^gamma` times its binary
    cross-entropy. The `reduction` of `loss_fcn` is then applied.

    Args:
        loss_fcn: an `nn.BCEWithLogitsLoss` or its configuration. The loss is copied, not modified. Default:
            `nn.BCEWithLogitsLoss()`.
        gamma: exponent of the factor `1 - p_t`.
        alpha: weight of elements whose target is 1. The weight of elements whose target is 0 is 1 - alpha.

    Raises:
        ConfigError: if `loss_fcn` is not an `nn.BCEWithLogitsLoss`.
    """

    def __init__(
        self, loss_fcn: nn.Module | Mapping[str, Any] | None = None, gamma: float = 1.5, alpha: float = 0.25
    ) -> None:
        super().__init__()
        built = (
            MODELS.build(loss_fcn) if isinstance(loss_fcn, Mapping) else loss_fcn or nn.BCEWithLogitsLoss()
        )
        if not isinstance(built, nn.BCEWithLogitsLoss):
            raise ConfigError(f"must be an nn.BCEWithLogitsLoss, not {type(built).__name__}", "loss_fcn")
        self.reduction = built.reduction
        self.loss_fcn: nn.BCEWithLogitsLoss = copy.deepcopy(built)
        self.loss_fcn.reduction = "none"
        self.gamma = gamma
        self.alpha = alpha

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss: a 0-dim tensor or, with the reduction 'none', a tensor with the shape of the targets.

        Args:
            outputs: logits of any shape.
            targets: 0, 1 or probabilities, with the shape of the logits or without the channel dimension.
        """
        if isinstance(outputs, Tensor) and outputs.shape == targets.shape:
            scores = at_least_float32(outputs)
        else:
            scores = at_least_float32(_one_channel(outputs, type(self).__name__))
        truth = targets.to(scores.dtype)
        p = scores.sigmoid()
        miss = 1 - (truth * p + (1 - truth) * (1 - p))
        factor = truth * self.alpha + (1 - truth) * (1 - self.alpha)
        losses: Tensor = self.loss_fcn(scores, truth) * factor * miss**self.gamma
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


def _one_channel(outputs: Any, loss: str) -> Tensor:
    """Return an output (N, 1, ...) without its channel dimension.

    Raises:
        ModelError: if there are several outputs or channels.
    """
    if not isinstance(outputs, Tensor):
        raise ModelError(
            f"{loss} requires a single output, but the network returns {len(outputs)} in training mode; disable its "
            "auxiliary heads (use_aux_heads=False)"
        )
    if outputs.ndim < 2 or outputs.shape[1] != 1:
        raise ModelError(
            f"{loss} requires an output with one channel, but the output has shape {tuple(outputs.shape)}; set "
            "num_classes=1 for the network"
        )
    return torch.squeeze(outputs, 1)
