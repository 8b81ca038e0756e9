"""Segmentation of large images with sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import ConfigError, DataError
from slipstream.typecheck import PositiveInt, check

__all__ = ["SlidingWindow", "slide"]


@dataclass(frozen=True)
class SlidingWindow:
    """Size and stride of the windows; the defaults match SegFormer on Cityscapes (arXiv 2105.15203)."""

    crop_size: tuple[int, int] = (1024, 1024)
    """Width and height of a window, in pixels."""
    stride: tuple[int, int] = (768, 768)
    """Horizontal and vertical distance between windows, in pixels."""
    batch_size: int = 4
    """Number of windows in a batch, which limits the network's memory use."""

    def __post_init__(self) -> None:
        check(self.crop_size, tuple[PositiveInt, PositiveInt], "crop_size")
        check(self.stride, tuple[PositiveInt, PositiveInt], "stride")
        check(self.batch_size, PositiveInt, "batch_size")
        if any(step > size for step, size in zip(self.stride, self.crop_size, strict=True)):
            raise ConfigError(f"must not exceed crop_size {self.crop_size}, but is {self.stride}", "stride")


def slide(network: Callable[[Tensor], Any], images: Tensor, window: SlidingWindow) -> Tensor:
    """Return the logits (N, C, H, W) for images (N, 3, H, W), averaged over the windows that contain each pixel.

    The last window of a row or column ends at the edge of the image. Images smaller than a window are padded with
    zeros at the right and bottom. Logits are summed in at least float32 on the device of the images.

    Args:
        network: module that returns logits (n, C, h, w) for a batch of windows, or a tuple with the logits as its
            first element. Logits of a different size are resized to the window size.
        images: network inputs, already normalized.
        window: size and stride of the windows.

    Raises:
        DataError: if the logits do not have four dimensions.
    """
    (width, height), (step_x, step_y) = window.crop_size, window.stride
    size = images.shape[-2:]
    if (right := max(width - size[1], 0)) + (bottom := max(height - size[0], 0)):
        images = F.pad(images, (0, right, 0, bottom))
    tops, lefts = _starts(images.shape[-2], height, step_y), _starts(images.shape[-1], width, step_x)
    total: Tensor | None = None
    positions = list(product(range(len(images)), tops, lefts))
    for first in range(0, len(positions), window.batch_size):
        chunk = positions[first : first + window.batch_size]
        crops = torch.stack([images[n, :, y : y + height, x : x + width] for n, y, x in chunk])
        logits = _logits(network(crops), (height, width))
        if total is None:
            shape = (len(images), logits.shape[1], *images.shape[-2:])
            total = logits.new_zeros(shape, dtype=torch.promote_types(logits.dtype, torch.float32))
        for (n, y, x), part in zip(chunk, logits, strict=True):
            total[n, :, y : y + height, x : x + width] += part
    if total is None:
        raise DataError("the batch contains no images; check the dataset and collate_fn")
    rows, columns = _coverage(total[0, 0, :, 0], tops, height), _coverage(total[0, 0, 0], lefts, width)
    return (total / (rows[:, None] * columns))[..., : size[0], : size[1]]


def _starts(length: int, window: int, stride: int) -> list[int]:
    return [*range(0, length - window, stride), length - window]


def _coverage(line: Tensor, starts: list[int], window: int) -> Tensor:
    """Return the number of windows that contain each position of a row or column."""
    counts = torch.zeros_like(line)
    for start in starts:
        counts[start : start + window] += 1
    return counts


def _logits(outputs: Any, size: tuple[int, int]) -> Tensor:
    logits: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    if logits.ndim != 4:
        raise DataError(
            f"sliding windows require logits (n, classes, h, w), but the network returned {tuple(logits.shape)}"
        )
    return logits if logits.shape[-2:] == size else F.interpolate(logits, size, mode="bilinear")
