"""Prepare images for prediction by applying the validation transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.transforms.geometry import SegCropImageAndMask
from slipstream.dataset.transforms.pipeline import Transform, compose


@dataclass(frozen=True)
class PreparedImage:
    """An image after the transforms.

    Attributes:
        sample: the transformed sample, with `inputs`, (3, H, W).
        box: the left, top, right and bottom edges of the image in `inputs`, without padding.
        size: the height and width of the image before the transforms.
    """

    sample: Mapping[str, Tensor]
    box: tuple[int, int, int, int]
    size: tuple[int, int]

    def resize_to_image(self, ids: Tensor) -> Tensor:
        """Return `ids` cropped to `box` and resized to `size` with nearest-neighbor interpolation, on the CPU.

        Args:
            ids: class ids of the pixels of `inputs`, (H, W).
        """
        left, top, right, bottom = self.box
        inside = ids[top:bottom, left:right].cpu()
        resized = F.interpolate(inside[None, None].double(), self.size, mode="nearest-exact")
        return resized[0, 0].to(ids.dtype)


def prepare_image(image: NDArray[np.uint8], transforms: Sequence[Transform]) -> PreparedImage:
    """Apply segmentation transforms to an image, uint8 (H, W, 3).

    The sample contains a mask of zeros as `targets`, so that a model removes the padding that its preprocessor adds.
    Crops are omitted, because the prediction must cover the whole image.
    """
    transforms = [transform for transform in transforms if not isinstance(transform, SegCropImageAndMask)]
    height, width = image.shape[:2]
    composed = compose(
        transforms, {"image": image, "mask": np.zeros((height, width), np.uint8)}, sample_rng(0)
    )
    return PreparedImage(composed.apply(), composed.region.image_box, (height, width))


def validation_transforms(cfg: Mapping[str, Any]) -> list[Any] | None:
    """Return the validation transforms from a Runner's configuration, or None if the configuration has none.

    For a wrapper dataset, the transforms of its first inner dataset are returned.
    """
    dataset = (cfg.get("val_dataloader") or {}).get("dataset") or {}
    while inner := dataset.get("dataset") or dataset.get("datasets"):
        dataset = inner[0] if isinstance(inner, list) else inner
    return list(dataset["transforms"]) if "transforms" in dataset else None
