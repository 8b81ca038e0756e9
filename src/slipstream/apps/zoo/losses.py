"""Losses that stay on the device: no synchronisation, no data-dependent shape, no NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError, ModelError
from slipstream.registry import MODELS

__all__ = ["CrossEntropy", "MultiHeadCrossEntropy", "at_least_float32"]


@MODELS.register_module()
class CrossEntropy(nn.Module):
    """Cross-entropy of classes or pixels: `nn.CrossEntropyLoss`, but 0 with gradient 0 where no target counts.

    Half-precision logits are summed in float32.

    Args:
        ignore_index: targets of this value do not count.
        label_smoothing: the share of each target that is spread over all classes (arXiv 1512.00567), from 0 to 1.
        weight: a factor of each class; the mean is divided by the sum of the targets' factors.

    Raises:
        ConfigError: `label_smoothing` is out of its range.
    """

    weight: Tensor | None

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, weight: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ConfigError(f"a share from 0 to 1 is needed, not {label_smoothing}", "label_smoothing")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        factors = None if weight is None else torch.as_tensor(weight, dtype=torch.float32)
        self.register_buffer("weight", factors, persistent=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, 0-dim.

        Args:
            outputs: logits (N, classes) or (N, classes, H, W).
            targets: class ids (N,) or (N, H, W) of any integer dtype; or shares of the classes in the shape of the
                logits, all of which count.

        Raises:
            ModelError: the network has several outputs.
        """
        if not isinstance(outputs, Tensor):
            raise ModelError(
                f"CrossEntropy is the loss of one output, and the network has {len(outputs)} in training: switch its "
                "auxiliary heads off (use_aux_heads=False), or take a loss of several heads, such as DiceCEEdgeLoss"
            )
        logits, smoothing = at_least_float32(outputs), self.label_smoothing
        if targets.is_floating_point():
            return F.cross_entropy(logits, targets, self.weight, label_smoothing=smoothing)
        targets = targets.long()
        total = F.cross_entropy(
            logits,
            targets,
            self.weight,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=smoothing,
        )
        counts = targets != self.ignore_index
        if self.weight is None:
            return total / counts.sum().clamp_min(1)
        share = (self.weight[targets.where(counts, 0)] * counts).sum()
        return total / share.where(share > 0, 1)


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
