"""Losses that stay on the device: no synchronisation, no data-dependent shape, no NaN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.registry import MODELS

__all__ = ["MultiHeadCrossEntropy", "at_least_float32"]


@MODELS.register_module()
class MultiHeadCrossEntropy(nn.Module):
    """The mean cross-entropy over the pixels that count, for each output of a network, times its weight.

    A batch without any pixel that counts gives 0 with gradient 0, where `nn.CrossEntropyLoss` gives NaN.
    Half-precision logits are summed in float32.

    Args:
        weights: factors of the main output and of the auxiliary ones, in the network's order; a network
            with fewer outputs uses the first.
        ignore_index: targets of this value do not count.
    """

    def __init__(self, weights: tuple[float, ...] = (1.0, 0.4, 0.4, 0.4), ignore_index: int = 255) -> None:
        super().__init__()
        self.weights = tuple(weights)
        self.ignore_index = ignore_index

    def forward(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_main": ..., "loss_aux0": ..., ...}`, 0-dim tensors whose sum is the loss.

        Args:
            outputs: logits (N, classes, H, W), or a tuple of them; main output first.
            targets: class ids (N, H, W), of any integer dtype.

        Raises:
            ModelError: there are more outputs than weights.
        """
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        if len(outputs) > len(self.weights):
            raise ModelError(
                f"MultiHeadCrossEntropy has {len(self.weights)} weights for the network's {len(outputs)} "
                "outputs; give `weights` one factor for each, the main output first"
            )
        targets = targets.long()
        count = (targets != self.ignore_index).sum().clamp_min(1)
        losses = [
            weight * self._total(logits, targets) / count
            for weight, logits in zip(self.weights, outputs, strict=False)
        ]
        names = ["loss_main", *(f"loss_aux{index}" for index in range(len(losses) - 1))]
        return dict(zip(names, losses, strict=True))

    def _total(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = at_least_float32(logits)
        return F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="sum")


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in which the values of many pixels can be summed: float16 and bfloat16 as float32."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
