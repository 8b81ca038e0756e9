"""Data preprocessors, which move batches to the device, and pad and normalize images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.dataset.transforms.device_transforms import apply_device_transforms, normalizes
from slipstream.errors import ConfigError, DataError
from slipstream.extras import extra
from slipstream.registry import MODELS
from slipstream.typecheck import PositiveInt, check

__all__ = ["BaseDataPreprocessor", "ImgDataPreprocessor"]


@MODELS.register_module()
class BaseDataPreprocessor(nn.Module):
    """Move a batch (nested dicts, lists and tuples of tensors) to the module's device, and apply device transforms.

    If a batch contains parameters for device transforms (key `device_params`), `cast_data` applies these transforms to
    the images (key `inputs`); see `slipstream.dataset.apply_device_transforms`.

    Args:
        non_blocking: copy from pinned memory asynchronously.
    """

    def __init__(self, non_blocking: bool = True) -> None:
        super().__init__()
        self.non_blocking = non_blocking
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Device of the output batches."""
        return self._device

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch on the device, with device transforms applied."""
        return self.cast_data(data)

    def cast_data(self, data: Any) -> Any:
        """Move every tensor (and every other object with a `to` method) to the device, and apply device transforms.

        Other values are returned unchanged.
        """
        if isinstance(data, Tensor):
            if data.device == self._device:  # faster than calling `to`, which would not copy either
                return data
            return data.to(self._device, non_blocking=self.non_blocking)
        if isinstance(data, list | tuple):
            moved = [self.cast_data(value) for value in data]
            kind: Any = type(data)
            return moved if kind is list else kind(*moved) if hasattr(data, "_fields") else kind(moved)
        if isinstance(data, Mapping):
            return apply_device_transforms({key: self.cast_data(value) for key, value in data.items()})
        return data.to(self._device) if hasattr(data, "to") else data

    def _apply(self, fn: Any, recurse: bool = True) -> BaseDataPreprocessor:
        # The module has no parameters, so the device is determined by applying each conversion to an empty tensor.
        super()._apply(fn, recurse)
        self._device = fn(torch.empty(0, device=self._device)).device
        return self


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Stack, pad and normalize images (uint8 or float) on the device, and return them as float32 (N, C, H, W).

    The images are stored under the key `inputs`, or are the first element if the batch is a tuple or list.

    Args:
        mean, std: a sequence of one value, or of one value per channel, on the scale of the inputs (0..255 for uint8).
            Specify both or neither. Specify neither if the dataset's transforms normalize the images.
        pad_size_divisor: pad the images at the right and bottom, so that height and width are multiples of this number.
        pad_value: padding value, applied after normalization.
        bgr_to_rgb, rgb_to_bgr: reverse the order of the channels.
        batch_augments: augmentations of kornia, applied in training, on the device, to uint8 images of one size, before
            the normalization. They receive images in the range 0 to 1. Targets (N, H, W) are transformed as masks.
        seg_pad_val: class id of the pixels of a mask that come from outside of the image.
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
        non_blocking: bool = True,
        batch_augments: Sequence[nn.Module] = (),
        seg_pad_val: int = 255,
    ) -> None:
        super().__init__(non_blocking)
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise ConfigError("specify the same number of values for mean and std, or neither")
        if bgr_to_rgb and rgb_to_bgr:
            raise ConfigError("bgr_to_rgb and rgb_to_bgr are mutually exclusive; remove one of them")
        check(pad_size_divisor, PositiveInt, "pad_size_divisor")
        self.normalizes = mean is not None
        self.register_buffer("mean", torch.tensor(mean or [0.0]).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std or [1.0]).view(-1, 1, 1), persistent=False)
        self.flips_channels = bgr_to_rgb or rgb_to_bgr
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value
        # In a tuple, the modules are not part of the model's state.
        self.batch_augments = tuple(batch_augments)
        self.seg_pad_val = seg_pad_val

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch on the device, with stacked, padded and normalized images."""
        if isinstance(data, list | tuple):
            images, *rest = self.cast_data(data)
            if training and self.batch_augments:
                images, *rest[:1] = self._augmented(images, *rest[:1])
            return [self._images(images), *rest]
        if not isinstance(data, Mapping):
            raise DataError(f"a batch must be a dict or a tuple, not {type(data).__name__}; check collate_fn")
        if "inputs" not in data:
            raise DataError(f"the batch has no 'inputs' key, only {sorted(data)}; the dataset must return it")
        if (self.normalizes or self.batch_augments) and normalizes(data):
            problem = "the dataset's transforms already normalize the images; remove the normalization here, or there"
            raise ConfigError(problem, "data_preprocessor")
        data = self.cast_data(data)
        if training and self.batch_augments:
            keys = ("inputs", "targets")[: 1 + ("targets" in data)]
            data |= zip(keys, self._augmented(*map(data.get, keys)), strict=True)
        return {**data, "inputs": self._images(data["inputs"])}

    def _augmented(self, images: Any, targets: Any = None) -> tuple[Any, ...]:
        """Return the augmented images, and the targets if there are any."""
        with extra("kornia"):
            from kornia.augmentation import AugmentationSequential
        if not isinstance(images, Tensor) or images.dtype != torch.uint8:
            raise DataError(
                "batch_augments requires uint8 images of one size; crop or resize them in the dataset, and do not "
                "convert them to floating point there"
            )
        is_mask = isinstance(targets, Tensor) and targets.shape == (len(images), *images.shape[-2:])
        # kornia fills masks with 0, so the class ids are increased by 1.
        values = [images.float() / 255, *([targets[:, None].float() + 1] if is_mask else [])]
        augment = AugmentationSequential(*self.batch_augments, data_keys=["input", "mask"][: len(values)])
        with torch.autocast(images.device.type, enabled=False):
            moved = augment(*values)
        if not is_mask:
            return (moved * 255, *([] if targets is None else [targets]))
        ids = moved[1][:, 0].round().long() - 1
        return moved[0] * 255, torch.where(ids < 0, self.seg_pad_val, ids).to(targets.dtype)

    def _images(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        if isinstance(images, Tensor):
            return self._pad(self._normalize(images), *images.shape[-2:])
        height = max(image.shape[-2] for image in images)
        width = max(image.shape[-1] for image in images)
        return torch.stack([self._pad(self._normalize(image), height, width) for image in images])

    def _normalize(self, image: Tensor) -> Tensor:
        if self.flips_channels:
            image = image.flip(-3)
        image = image.float()
        if not self.normalizes:
            return image
        if len(self.mean) not in (1, image.shape[-3]):  # broadcasting would add channels to the image
            raise DataError(
                f"the images have {image.shape[-3]} channels, but mean has length {len(self.mean)}"
            )
        return (image - self.mean) / self.std

    def _pad(self, image: Tensor, height: int, width: int) -> Tensor:
        divisor = self.pad_size_divisor
        bottom = math.ceil(height / divisor) * divisor - image.shape[-2]
        right = math.ceil(width / divisor) * divisor - image.shape[-1]
        return F.pad(image, (0, right, 0, bottom), value=self.pad_value) if bottom or right else image
