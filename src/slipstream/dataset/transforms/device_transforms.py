"""Device transforms: color jitter and normalization of a batch of images on the device.

A dataset does not compute these transforms. It draws their parameters and adds them to each sample, under the key
`device_params`, as a float32 tensor of shape (K,). No value has to be read from the device to find the layout, because
K determines it:

    13  color:     left, top, right, bottom of the image without its padding, then three stages of (f, s, c)
     6  affine:     scale and shift of red, green, blue
    19  both, in this order

A stage maps x, in the range 0 to 255, to `f * x + s * gray + c * mean`, clamped to 0..255, where gray is the pixel's
brightness (ITU-R 601) and mean is the mean of gray over the image. As in torchvision, a brightness change is (f, 0, 0),
a saturation change is (f, 1 - f, 0), a contrast change is (f, 0, 1 - f), and the identity is (1, 0, 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DataError

__all__ = [
    "NUM_AFFINE_PARAMS", "NUM_COLOR_PARAMS", "apply_device_transforms", "check_same_params", "normalizes",
    "transform_images",
]  # fmt: skip

# Number of color parameters and number of affine parameters.
NUM_COLOR_PARAMS, NUM_AFFINE_PARAMS = 13, 6
_STAGES = 3
_GRAY = (0.299, 0.587, 0.114)


def transform_images(inputs: Tensor, params: Tensor) -> Tensor:
    """Return the transformed images, float32 (N, 3, H, W).

    Color jitter does not affect the padding, and contrast changes exclude the padding from the mean. Unlike in Pillow
    and torchvision, intermediate results are not rounded to integers.

    Args:
        inputs: uint8 or float (N, 3, H, W), in the range 0 to 255.
        params: float32 (N, K), one row of parameters per image.

    Raises:
        DataError: K is not 6, 13 or 19, or the images do not have three channels.
    """
    length = params.shape[-1]
    if length not in (NUM_COLOR_PARAMS, NUM_AFFINE_PARAMS, NUM_COLOR_PARAMS + NUM_AFFINE_PARAMS):
        raise DataError(f"'device_params' must have 6, 13 or 19 parameters per image, not {length}")
    if inputs.shape[1] != 3:
        raise DataError(f"device transforms require images (N, 3, H, W), not {tuple(inputs.shape)}")
    images = torch.empty_like(inputs, dtype=torch.float32)
    # On the CPU, processing one image at a time keeps the image in the cache, which halves the time.
    one_by_one = images.device.type == "cpu" and not torch.compiler.is_compiling()
    size = 1 if one_by_one else max(1, len(images))
    for outputs, images_in, rows in zip(
        images.split(size), inputs.split(size), params.split(size), strict=True
    ):
        outputs.copy_(images_in)
        if length != NUM_AFFINE_PARAMS:
            _color(outputs, rows[:, :NUM_COLOR_PARAMS, None, None, None])
        if length != NUM_COLOR_PARAMS:
            scale, shift = rows[:, -NUM_AFFINE_PARAMS:].reshape(-1, 2, 3, 1, 1).unbind(1)
            outputs.mul_(scale).add_(shift)
    return images


def apply_device_transforms(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the parameters in `device_params` to `inputs`, and return the batch without `device_params`.

    A batch without `device_params` is returned unchanged. `inputs` may also be a list of (3, H, W) images.
    """
    rest = dict(batch)
    if "inputs" not in rest or "device_params" not in rest:
        return rest
    inputs, params = rest["inputs"], rest.pop("device_params")
    if isinstance(inputs, Tensor):
        return {**rest, "inputs": transform_images(inputs, params)}
    images = [transform_images(image[None], row[None])[0] for image, row in zip(inputs, params, strict=True)]
    return {**rest, "inputs": images}


def normalizes(batch: Mapping[str, Any]) -> bool:
    """Return whether the batch's device transforms normalize its images."""
    params = batch.get("device_params")
    return params is not None and params[0].shape[-1] != NUM_COLOR_PARAMS


def check_same_params(samples: Sequence[Any]) -> None:
    """Raise a DataError if the number of device transform parameters or the dtype of the images differs.

    Without this check, collating would fail, silently drop the parameters, or convert the images to one dtype.
    """
    fields = [sample if isinstance(sample, Mapping) else {} for sample in samples]
    params = {getattr(sample.get("device_params"), "shape", None) for sample in fields}
    if len(params) > 1 or len({getattr(sample.get("inputs"), "dtype", None) for sample in fields}) > 1:
        raise DataError(
            "a batch mixes samples with and without color jitter or normalization; use the same color jitter "
            "(SegColorJitter) and normalization (SegStandardize, SegNormalize, ToTensor, or that of another library) "
            "in all datasets"
        )


def _color(images: Tensor, params: Tensor) -> None:
    """Apply the three stages in place. On the CPU, this takes half as long as out-of-place operations.

    `params` has shape (N, 13, 1, 1, 1).
    """
    inside = _inside(images, params[:, :4, 0])
    pixels = inside.sum((-2, -1), keepdim=True).clamp(min=1)
    for stage in range(_STAGES):
        factor, gray_factor, mean_factor = params[:, 4 + 3 * stage : 7 + 3 * stage].unbind(1)
        red, green, blue = images.split(1, dim=1)
        gray = (_GRAY[0] * red).add_(green, alpha=_GRAY[1]).add_(blue, alpha=_GRAY[2]).mul_(inside)
        mean = gray.sum((-2, -1), keepdim=True) / pixels
        images.mul_(inside * (factor - 1) + 1)
        images.add_(gray.mul_(gray_factor).add_(inside * (mean_factor * mean))).clamp_(0, 255)


def _inside(images: Tensor, rectangle: Tensor) -> Tensor:
    """Return a float32 mask (N, 1, H, W): 1 inside `rectangle` (N, 4, 1, 1), and 0 in the padding."""
    left, top, right, bottom = rectangle[:, :, None].unbind(1)
    row = torch.arange(images.shape[-2], device=images.device).view(1, 1, -1, 1)
    column = torch.arange(images.shape[-1], device=images.device).view(1, 1, 1, -1)
    rows, columns = (row >= top) & (row < bottom), (column >= left) & (column < right)
    return rows.float() * columns.float()
