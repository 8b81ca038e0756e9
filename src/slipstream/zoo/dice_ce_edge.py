"""The loss used in the PP-LiteSeg and DDRNet recipes: Dice, and cross-entropy with a higher weight near edges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.losses import (
    Outputs,
    all_heads,
    binary_cross_entropy_and_sums,
    cross_entropy_and_sums,
    dice_loss,
    edges,
    supports_low_resolution,
)
from slipstream.registry import MODELS


@MODELS.register_module()
class DiceCEEdgeLoss(nn.Module):
    """For each head, the weighted sum of cross-entropy over all pixels, cross-entropy near edges, and Dice.

    Let `p` be the softmax of a head's logits, `y` the targets, V the pixels that are not ignored, E the pixels with
    more than one label in their `edge_kernel` x `edge_kernel` neighborhood (clipped at the border), and ce = -log p[y]
    in V and 0 elsewhere. Then::

        CE   = ce_edge_weights[0] * mean(ce) + ce_edge_weights[1] * mean(ce over E)
        Dice = mean over classes c of 1 - (2 I_c + 1) / (A_c + 1 + 1e-5)
               I_c = sum of p[c] over V where y = c
               A_c = sum of p[c] over V + number of pixels with y = c
        loss = sum over heads of weights[head] * (dice_ce_weights[0] * CE + dice_ce_weights[1] * Dice)

    As in SuperGradients, the first mean includes ignored pixels, and boundaries of ignored regions count as edges. The
    mean over an empty E is 0. A detail head has one channel and predicts E: its CE is the binary cross-entropy between
    its logits and E, and its Dice uses the sigmoid of the logits. Dice is defined as in V-Net (arXiv 1606.04797).

    Half-precision logits are converted to float32. The computation does not cause a device synchronization.

    Args:
        num_classes: number of channels of the logits.
        num_aux_heads: number of auxiliary outputs after the main one.
        num_detail_heads: number of one-channel detail outputs after the auxiliary outputs.
        weights: weight of each output in the loss, in the order of the network's outputs.
        dice_ce_weights: weights of cross-entropy and Dice, in this order.
        ignore_index: target value of ignored pixels.
        edge_kernel: width of the neighborhood; must be odd. An edge is `edge_kernel - 1` pixels wide.
        ce_edge_weights: weights of cross-entropy over all pixels and of cross-entropy near edges, in this order.

    Raises:
        ModelError: if the number of weights is wrong, or `edge_kernel` is not odd and positive.
    """

    takes_class_ids = True

    def __init__(
        self,
        num_classes: int,
        num_aux_heads: int = 2,
        num_detail_heads: int = 1,
        weights: Sequence[float] = (1, 1, 1, 1),
        dice_ce_weights: Sequence[float] = (1, 1),
        ignore_index: int = -100,
        edge_kernel: int = 3,
        ce_edge_weights: Sequence[float] = (0.5, 0.5),
    ) -> None:
        super().__init__()
        if len(weights) != 1 + num_aux_heads + num_detail_heads or edge_kernel % 2 == 0:
            raise ModelError(
                "DiceCEEdgeLoss: weights must contain a number for each head, and edge_kernel must be odd"
            )
        self.num_classes = num_classes
        self.num_detail_heads = num_detail_heads
        self.weights = tuple(weights)
        self.dice_ce_weights = tuple(dice_ce_weights)
        self.ignore_index = ignore_index
        self.edge_kernel = edge_kernel
        self.ce_edge_weights = tuple(ce_edge_weights)
        kinds = ["loss_main"] + [f"loss_aux{i}" for i in range(num_aux_heads)]
        self.names = kinds + [f"loss_detail{i}" for i in range(num_detail_heads)]

    @supports_low_resolution
    def forward(self, outputs: Outputs | Sequence[Outputs], targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_main": ..., "loss_aux0": ..., "loss_detail0": ...}`, 0-dim tensors whose sum is the loss.

        Args:
            outputs: logits of all heads: (N, num_classes, H, W) for the main and auxiliary heads, followed by
                (N, 1, H, W) for the detail heads. In evaluation mode, only the main logits.
            targets: class ids (N, H, W) of any integer dtype.

        Raises:
            ModelError: if the number of outputs or the number of channels is wrong.
        """
        heads = all_heads(outputs)
        self._check(heads)
        at_edges = edges(targets, self.edge_kernel)
        pixel_weight, edge_weight = self.ce_edge_weights
        weights = pixel_weight / targets.numel() + at_edges * (edge_weight / at_edges.sum().clamp_min(1))
        losses = {}
        for name, weight, logits in zip(self.names, self.weights, heads, strict=False):
            if name.startswith("loss_detail"):
                ce, hits, area = binary_cross_entropy_and_sums(logits, at_edges)
                cross_entropy = ce.mean()
            else:
                ce, hits, area = cross_entropy_and_sums(logits, targets, self.ignore_index)
                cross_entropy = (ce * weights).sum()
            first, second = self.dice_ce_weights
            losses[name] = weight * (first * cross_entropy + second * dice_loss(hits, area))
        return losses

    def _check(self, outputs: tuple[Outputs, ...]) -> None:
        needed = [1 if name.startswith("loss_detail") else self.num_classes for name in self.names]
        channels = [logits.shape[1] for logits in outputs]
        if channels not in (needed, needed[:1]):
            raise ModelError(
                f"DiceCEEdgeLoss expects outputs with {needed} channels ({', '.join(self.names)}), but the network "
                f"returns {channels}; set num_classes, num_aux_heads and num_detail_heads to match its outputs"
            )
