"""SuperGradients' `BinarySegmentationVisualizationCallback`, which records images of predicted masks."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.registry import HOOKS
from slipstream.training.phases import Phase, PhaseCallback, PhaseContext

__all__ = ["BinarySegmentationVisualizationCallback"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CORRECT, _WRONG, _MISSED = (0, 128, 0), (255, 0, 0), (0, 0, 255)
_OPACITY = 0.8


@HOOKS.register_module()
class BinarySegmentationVisualizationCallback(PhaseCallback):
    """Record the images of one evaluation batch, with the pixels of the class colored.

    Green pixels are predicted correctly, red pixels are predicted but not in the target, and blue pixels are missing
    from the prediction. Float images are assumed to have ImageNet's normalization.

    Args:
        phase: when to record the images: `VALIDATION_BATCH_END` or `TEST_BATCH_END`.
        freq: number of epochs between two recordings.
        batch_idx: index of the batch.
        last_img_idx_in_batch: number of images to record; -1 for all images of the batch.

    Raises:
        ConfigError: if `freq` is less than 1, or `phase` is not one of the two phases above.
    """

    def __init__(
        self, phase: Phase | str, freq: int, batch_idx: int = 0, last_img_idx_in_batch: int = -1
    ) -> None:
        super().__init__(phase)
        if self.phase not in (Phase.VALIDATION_BATCH_END, Phase.TEST_BATCH_END):
            raise ConfigError(
                f"must be VALIDATION_BATCH_END or TEST_BATCH_END, which have predictions, not {self.phase.value}",
                "phase",
            )
        if freq < 1:
            raise ConfigError(f"must be at least 1, not {freq}", "freq")
        self.freq = freq
        self.batch_idx = batch_idx
        self.last_img_idx_in_batch = last_img_idx_in_batch

    def __call__(self, context: PhaseContext) -> None:
        """Record the images of batch `batch_idx` every `freq` epochs."""
        if context.epoch % self.freq or context.batch_idx != self.batch_idx:
            return
        count = len(context.inputs) if self.last_img_idx_in_batch < 0 else self.last_img_idx_in_batch
        images, predicted, target = (
            values[:count].detach().cpu() for values in (context.inputs, context.preds, context.target)
        )
        context.sg_logger.add_images(
            f"batch_{self.batch_idx}_images",
            _overlays(images, predicted > 0, target > 0),
            "NCHW",
            context.epoch,
        )


def _overlays(images: Tensor, predicted: Tensor, target: Tensor) -> Tensor:
    """Return the colored images, uint8 (N, 3, H, W), for images (N, 3, H, W) and bool masks (N, H, W)."""
    pixels = images.float()
    if images.is_floating_point():
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
        pixels = (pixels * std + mean) * 255
    for color, mask in (
        (_CORRECT, predicted & target),
        (_WRONG, predicted & ~target),
        (_MISSED, ~predicted & target),
    ):
        colored = pixels.lerp(torch.tensor(color, dtype=torch.float32).view(3, 1, 1), _OPACITY)
        pixels = torch.where(mask[:, None], colored, pixels)
    return pixels.round().clamp(0, 255).to(torch.uint8)
