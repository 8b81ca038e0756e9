"""The networks and losses of six recipes, with crops that are small enough for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.zoo import models
from slipstream.zoo.dice_ce_edge import DiceCEEdgeLoss
from slipstream.zoo.losses import MultiHeadCrossEntropy
from slipstream.zoo.stdc_loss import STDCLoss

CLASSES, IGNORE_INDEX = 19, 19


@dataclass(frozen=True)
class Case:
    """A network, its loss, and its training batches."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    batch_size: int
    dense: bool = False
    """Whether the targets contain one class per pixel instead of one class per image."""
    learning_rate: float = 0.01
    tolerance: float = 1e-3
    """Relative tolerance for the losses of the first steps. BatchNorm over few values amplifies rounding errors."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train()

    def batches(self, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        label_shape = (self.batch_size, *self.shape[1:]) if self.dense else (self.batch_size,)
        return [
            (
                torch.randn(self.batch_size, *self.shape, generator=generator),
                torch.randint(0, self.classes, label_shape, generator=generator),
            )
            for _ in range(count)
        ]


def total(losses: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the total loss."""
    return losses if isinstance(losses, Tensor) else sum(losses.values(), start=torch.zeros(()))


def _recipe(name: str, loss: nn.Module, size: int = 128, batch_size: int = 4) -> Case:
    heads = {"use_aux_heads": True} if isinstance(loss, DiceCEEdgeLoss) else {}
    return Case(
        lambda: models.get(name, num_classes=CLASSES, **heads),
        lambda outputs, targets: total(loss(outputs, targets)),
        (3, size, size),
        CLASSES,
        batch_size,
        dense=True,
        learning_rate=1e-4,
        tolerance=0.02,
    )


def edge_loss(heads: int, weights: tuple[float, ...]) -> nn.Module:
    return DiceCEEdgeLoss(
        CLASSES, heads, num_detail_heads=0, weights=weights, ignore_index=IGNORE_INDEX, edge_kernel=5
    )


RECIPES = {
    "pp_lite_t_seg75": _recipe("pp_lite_t_seg", edge_loss(3, (1, 1, 1, 1))),
    "stdc1_seg75": _recipe("stdc1_seg", STDCLoss(num_classes=CLASSES, ignore_index=IGNORE_INDEX)),
    "regseg48": _recipe("regseg48", MultiHeadCrossEntropy(ignore_index=IGNORE_INDEX)),
    "segformer_b0": _recipe("segformer_b0", MultiHeadCrossEntropy(ignore_index=IGNORE_INDEX)),
    "ddrnet_23": _recipe("ddrnet_23", edge_loss(1, (1, 0.4))),
    "ddrnet_23_slim": _recipe("ddrnet_23_slim", edge_loss(1, (1, 0.4))),
}
