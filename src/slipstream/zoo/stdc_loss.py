"""The loss of STDC-Seg (arXiv 2104.13188): cross-entropy over hard pixels, and an edge loss for details."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError, ModelError
from slipstream.losses import (
    Outputs,
    all_heads,
    binary_cross_entropy_and_sums,
    cross_entropy,
    dice_loss,
    hard_pixels,
    supports_low_resolution,
)
from slipstream.registry import MODELS
from slipstream.typecheck import Probability, check


@MODELS.register_module()
class OhemCELoss(nn.Module):
    """Cross-entropy over hard pixels only (online hard example mining); see `slipstream.losses.hard_pixels`.

    The loss is the mean over the hard pixels. If all pixels are ignored, the loss and its gradient are 0. The
    computation does not cause a device synchronization.

    Args:
        threshold: probability, greater than 0 and at most 1.
        mining_percent: minimum fraction of pixels to keep, between 0 and 1.
        ignore_index: target value of ignored pixels.

    Raises:
        ConfigError: if `threshold` or `mining_percent` is out of range.
    """

    def __init__(
        self, threshold: float = 0.7, mining_percent: float = 1 / 16, ignore_index: int = 255
    ) -> None:
        super().__init__()
        check(threshold, Probability, "threshold")
        check(mining_percent, Probability, "mining_percent")
        self.mining_percent = mining_percent
        self.ignore_index = ignore_index
        self.threshold = threshold

    @supports_low_resolution
    def forward(self, logits: Outputs, targets: Tensor) -> Tensor:
        """Return the loss as a 0-dim tensor, for logits (N, classes, H, W) and integer class ids (N, H, W)."""
        targets = targets.long()
        losses = cross_entropy(logits, targets, ignore_index=self.ignore_index)
        valid = targets != self.ignore_index
        return (hard_pixels(losses.detach(), valid, self.threshold, self.mining_percent) * losses).sum()


def detail_target(targets: Tensor, ignore_index: int, threshold: float = 1.0) -> Tensor:
    """Return the detail mask of class ids (N, H, W) as a bool tensor (N, 1, H, W).

    A pixel is an edge if it is not ignored, and at least `threshold` of its eight neighbors have a different class, are
    ignored or are outside the image. The details are the edges and all pixels of the 2x2 blocks whose top-left pixel
    is an edge.

    This is equivalent to the paper's pyramid, which applies a Laplacian (8 in the center, -1 around it) to the mask of
    each class with strides 1, 2 and 4. Each map is 1 where the result is at least `threshold`. The maps are upsampled
    and weighted by 0.6, 0.3 and 0.1, and the mask is 1 where their sum is at least 0.3. The third map has no effect.
    The paper's weights are trainable, but receive no gradient, because the mask is the result of a comparison.
    """
    height, width = targets.shape[-2:]
    labels = targets.to(torch.int16)
    valid = labels != ignore_index
    padded = F.pad(labels.masked_fill(~valid, -1), (1, 1, 1, 1), value=-1)
    windows = padded.unfold(1, 3, 1).unfold(2, 3, 1)
    differing = (windows != labels[..., None, None]).sum((-2, -1), dtype=torch.int16)
    edges = valid & (differing >= threshold)
    halved = edges[:, ::2, ::2].repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    return (edges | halved[:, :height, :width])[:, None]


@MODELS.register_module()
class STDCLoss(nn.Module):
    """`OhemCELoss` of the main and the auxiliary outputs, plus a detail loss.

    The detail loss is the binary cross-entropy, averaged over all pixels, plus 1 - Dice, each weighted by its factor in
    `detail_weights`. Dice = (2 sum(p t) + 1) / (sum(p) + sum(t) + 1) for probabilities p and `detail_target` t of the
    batch. Half-precision outputs are converted to float32.

    Args:
        num_classes: if set, the number of channels that the main output must have; at least 2.
        weights: factors for the main output, the auxiliary outputs (s32, s16) and the details, in this order.
        threshold: see `OhemCELoss`.
        mining_percent: see `OhemCELoss`.
        ignore_index: target value of ignored pixels.
        num_detail_heads: number of detail outputs, which are the last outputs.
        detail_weights: factors for cross-entropy and Dice, in this order.
        detail_threshold: number of neighbors from 1 to 8; see `detail_target`.

    Raises:
        ConfigError: if an argument is out of range.
    """

    takes_class_ids = True

    def __init__(
        self,
        num_classes: int | None = None,
        weights: tuple[float, ...] = (1.0, 0.6, 0.4, 1.0),
        threshold: float = 0.7,
        mining_percent: float = 1 / 16,
        ignore_index: int = 255,
        num_detail_heads: int = 1,
        detail_weights: tuple[float, float] = (1.0, 1.0),
        detail_threshold: float = 1.0,
    ) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 2:
            raise ConfigError(
                f"must be at least 2, not {num_classes}; for a network with one output channel, use BCEDiceLoss",
                "num_classes",
            )
        self.num_classes = num_classes
        self.num_detail_heads = num_detail_heads
        self.detail_weights = tuple(detail_weights)
        self.detail_threshold = detail_threshold
        self.weights = tuple(weights)
        self.ohem = OhemCELoss(threshold, mining_percent, ignore_index)
        self.ignore_index = ignore_index

    @supports_low_resolution
    def forward(self, outputs: Outputs | tuple[Outputs, ...], targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_main": ..., "loss_aux0": ..., "loss_detail": ...}`, 0-dim tensors whose sum is the loss.

        With several detail heads, the keys are `loss_detail0`, `loss_detail1`, ...

        Args:
            outputs: (main, auxiliary..., details), as returned by `STDCSeg` in training: logits (N, classes, H, W), and
                (N, 1, H, W) for details. In evaluation mode, only the main logits.
            targets: class ids (N, H, W) of any integer dtype.

        Raises:
            ModelError: if the number of outputs is neither one nor the number of weights, or the number of classes
                is not `num_classes`.
        """
        heads = all_heads(outputs)
        self._check(heads)
        classifiers = len(self.weights) - self.num_detail_heads
        names = ["loss_main", *(f"loss_aux{index}" for index in range(classifiers - 1))]
        losses = {
            name: factor * self.ohem(logits, targets)
            for name, factor, logits in zip(names, self.weights, heads, strict=False)
        }
        if details := heads[classifiers:]:
            truth = detail_target(targets, self.ignore_index, self.detail_threshold)
            for index, (factor, logits) in enumerate(zip(self.weights[classifiers:], details, strict=True)):
                name = "loss_detail" if len(details) == 1 else f"loss_detail{index}"
                losses[name] = factor * self._detail(logits, truth)
        return losses

    def _check(self, outputs: tuple[Outputs, ...]) -> None:
        if len(outputs) not in (1, len(self.weights)):
            raise ModelError(
                f"STDCLoss requires one weight per network output ({len(outputs)}), but `weights` has "
                f"{len(self.weights)}; set `weights` to one factor per output: main output, auxiliary outputs, details"
            )
        if self.num_classes not in (None, outputs[0].shape[1]):
            raise ModelError(
                f"STDCLoss expects {self.num_classes} classes, but the network returns {outputs[0].shape[1]}; "
                "set the same num_classes for both"
            )

    def _detail(self, logits: Outputs, truth: Tensor) -> Tensor:
        losses, hits, area = binary_cross_entropy_and_sums(logits, truth[:, 0])
        cross_entropy_weight, dice_weight = self.detail_weights
        return cross_entropy_weight * losses.mean() + dice_weight * dice_loss(hits, area, eps=0)
