"""SuperGradients' image processing classes, as entries for `Network.set_dataset_processing_params`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CenterCrop",
    "ComposeProcessing",
    "ImagePermute",
    "NormalizeImage",
    "Resize",
    "SegmentationPadShortToCropSize",
    "SegmentationRescale",
    "StandardizeImage",
]


class _Entry(dict[str, Any]):
    """The entry `{Name: {arguments}}`, as in recipes, where `Name` is the name of the class."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__({type(self).__name__: arguments})


class CenterCrop(_Entry):
    """Crop the image to the `size` x `size` pixels at its center."""

    def __init__(self, size: int = 224) -> None:
        super().__init__(size=size)


class ComposeProcessing(_Entry):
    """Apply several processing steps in order."""

    def __init__(self, processings: Sequence[Any]) -> None:
        super().__init__(processings=list(processings))


class ImagePermute(_Entry):
    """Has no effect, because images are always converted to (3, H, W)."""

    def __init__(self, permutation: Sequence[int] = (2, 0, 1)) -> None:
        super().__init__(permutation=tuple(permutation))


class NormalizeImage(_Entry):
    """Subtract `mean` from the image and divide by `std`. Both have one number per channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(mean=list(mean), std=list(std))


class Resize(_Entry):
    """Resize the image so that its shorter side has `size` pixels."""

    def __init__(self, size: int = 224) -> None:
        super().__init__(size=size)


class SegmentationPadShortToCropSize(_Entry):
    """See `slipstream.dataset.SegPadShortToCropSize`."""

    def __init__(self, crop_size: int | Sequence[int], fill_image: int | Sequence[int] = 0) -> None:
        super().__init__(crop_size=crop_size, fill_image=fill_image, fill_mask=0)


class SegmentationRescale(_Entry):
    """See `slipstream.dataset.SegRescale`."""

    def __init__(
        self, scale_factor: float | None = None, short_size: int | None = None, long_size: int | None = None
    ) -> None:
        sizes = {"scale_factor": scale_factor, "short_size": short_size, "long_size": long_size}
        super().__init__(**{key: value for key, value in sizes.items() if value is not None})


class StandardizeImage(_Entry):
    """Divide pixel values by `max_value`."""

    def __init__(self, max_value: float = 255.0) -> None:
        super().__init__(max_value=max_value)
