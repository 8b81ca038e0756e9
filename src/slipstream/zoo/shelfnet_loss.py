"""The loss used in the ShelfNet recipes: cross-entropy over the hard pixels of each output."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from slipstream.losses import Outputs, all_heads, supports_low_resolution
from slipstream.registry import MODELS
from slipstream.zoo.stdc_loss import OhemCELoss


@MODELS.register_module()
class ShelfNetOHEMLoss(nn.Module):
    """The sum of `OhemCELoss` over all outputs of the network.

    At least one pixel is always selected. SuperGradients' loss is NaN if no pixel is hard and `mining_percent` selects
    none.

    Args:
        threshold, mining_percent: see `OhemCELoss`.
        ignore_lb: target value of ignored pixels. None and negative values mean -100.
    """

    takes_class_ids = True

    def __init__(
        self, threshold: float = 0.7, mining_percent: float = 1e-4, ignore_lb: int | None = 255
    ) -> None:
        super().__init__()
        self.ignore_index = -100 if ignore_lb is None or ignore_lb < 0 else ignore_lb
        self.ohem = OhemCELoss(threshold, mining_percent, self.ignore_index)

    @supports_low_resolution
    def forward(self, outputs: Outputs | Sequence[Outputs], targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_main": ..., "loss_aux0": ..., ...}`, 0-dim tensors whose sum is the loss.

        Args:
            outputs: logits (N, classes, H, W), or a sequence of them.
            targets: class ids (N, H, W) of any integer dtype.
        """
        heads = all_heads(outputs)
        names = ["loss_main", *(f"loss_aux{index}" for index in range(len(heads) - 1))]
        return {name: self.ohem(logits, targets) for name, logits in zip(names, heads, strict=True)}
