"""Data preprocessors with the attributes that subclasses in OpenMMLab libraries use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import DataError
from slipstream.model.data_preprocessor import BaseDataPreprocessor as OwnPreprocessor
from slipstream.openmmlab.mmengine.model.utils import stack_batch
from slipstream.openmmlab.mmengine.registry import MODELS
from slipstream.openmmlab.mmengine.structures import BaseDataElement

__all__ = ["BaseDataPreprocessor", "ImgDataPreprocessor"]


def _contiguous(value: Any) -> Any:
    """Make a tensor (or a data element's tensors) contiguous, with default strides even for dimensions of size 1."""
    if isinstance(value, BaseDataElement):
        return value._map(_contiguous)
    if type(value) is not Tensor or value.layout is not torch.strided:
        return value
    strides = [1]
    for size in reversed(value.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return value.contiguous().as_strided(value.shape, strides[: value.dim()])


@MODELS.register_module()
class BaseDataPreprocessor(OwnPreprocessor):
    """Move a batch (nested dicts and sequences of tensors and data elements) to the module's device.

    Args:
        non_blocking: copy from pinned memory asynchronously.
    """

    def __init__(self, non_blocking: bool | None = False) -> None:
        super().__init__(bool(non_blocking))

    def cast_data(self, data: Any) -> Any:
        """Move all tensors to the device, and make the tensors of data elements contiguous.

        A compiled step is specialized to the strides of its inputs, and transforms such as flips change the strides.
        """
        moved = super().cast_data(data)
        return _contiguous(moved) if isinstance(moved, BaseDataElement) else moved

    @property
    def _non_blocking(self) -> bool:
        return self.non_blocking

    @_non_blocking.setter
    def _non_blocking(self, value: bool | None) -> None:
        self.non_blocking = bool(value)


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Normalize, pad and stack the images in `inputs`, a tensor (N, C, H, W) or a list of tensors (C, H, W).

    Args:
        mean, std: one value per channel, or a single value. Set both or neither.
        pad_size_divisor: pad the bottom and right edges so that height and width are multiples of this number.
        pad_value: padding value; padding is applied after normalization.
        bgr_to_rgb, rgb_to_bgr: reverse the channel order.
        non_blocking: see `BaseDataPreprocessor`.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool | None = False,
    ) -> None:
        super().__init__(non_blocking)
        assert not (bgr_to_rgb and rgb_to_bgr), (
            "bgr_to_rgb and rgb_to_bgr are mutually exclusive; remove one of them"
        )
        assert (mean is None) == (std is None), "specify both mean and std, or neither"
        self._enable_normalize = mean is not None
        for name, values in (("mean", mean), ("std", std)):
            if values is not None:
                assert len(values) in (1, 3), f"{name} must have 1 or 3 values, not {len(values)}"
                self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)
        self._channel_conversion = bgr_to_rgb or rgb_to_bgr
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch on the device, with all images in one tensor. `data_samples` defaults to None.

        Raises:
            DataError: if the images are neither a 4-dim tensor nor a sequence of tensors, or if their number of
                channels does not match the options.
        """
        data = self.cast_data(data)
        images = data["inputs"] if isinstance(data, Mapping) else None
        if isinstance(images, Tensor) and images.dim() == 4:
            self._check_channels(images, (1, 3))  # as in MMEngine, a single channel is repeated
            batch = self._pad(self._normalize(images))
        elif isinstance(images, list | tuple) and all(isinstance(image, Tensor) for image in images):
            for image in images:
                self._check_channels(image, (3,))
            prepared = [self._normalize(image) for image in images]
            batch = stack_batch(prepared, self.pad_size_divisor, self.pad_value)
        else:
            raise DataError(
                "the batch must be a dict whose 'inputs' are a tensor of shape (N, C, H, W) or a list of tensors of "
                "shape (C, H, W); check the dataset's output and collate_fn"
            )
        data["inputs"] = batch
        data.setdefault("data_samples", None)
        return data

    def _check_channels(self, image: Tensor, accepted: tuple[int, ...]) -> None:
        """Check that the number of channels is valid for the channel conversion and for the normalization."""
        channels = image.shape[-3] if image.dim() >= 3 else 0
        if self._channel_conversion and channels < 3:
            raise DataError(
                f"bgr_to_rgb and rgb_to_bgr require images with 3 channels, but an image has shape "
                f"{tuple(image.shape)}; convert the images to color, or remove the option"
            )
        used_channels = 3 if self._channel_conversion else channels
        if self._enable_normalize and len(self.mean) == 3 and used_channels not in accepted:
            raise DataError(
                f"mean and std have 3 values, but an image has shape {tuple(image.shape)}; set a single value, or load "
                "images with 3 channels"
            )

    def _normalize(self, image: Tensor) -> Tensor:
        if self._channel_conversion:
            image = image.narrow(-3, 0, 3).flip(-3)  # `narrow` removes an alpha channel
        image = image.float()
        return (image - self.mean) / self.std if self._enable_normalize else image

    def _pad(self, images: Tensor) -> Tensor:
        bottom, right = (
            math.ceil(size / self.pad_size_divisor) * self.pad_size_divisor - size
            for size in images.shape[-2:]
        )
        return F.pad(images, (0, right, 0, bottom), value=self.pad_value)
