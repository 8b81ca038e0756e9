"""What remains to be done to images when they have arrived on the device: colours and normalisation, batched.

A data set does not compute these: it draws what shall be done and sends it along as a sample's *program*, float32
(K,). K says which parts it has, so that nothing has to be read from the device:

    13  colours:    left, top, right, bottom of the picture inside its padding, then three stages of (f, s, c)
     6  affine:     scale and shift of red, green, blue
    19  both, in this order

A stage turns x, on a scale of 0 to 255, into `f * x + s * grey + c * mean`, cut to 0..255, where grey is the pixel's
brightness (ITU-R 601) and mean is the mean of grey. So brightness is (f, 0, 0), saturation (f, 1 - f, 0), contrast
(f, 0, 1 - f), and nothing at all (1, 0, 0), as torchvision defines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DataError

__all__ = ["AFFINE", "COLOURS", "apply_device_transforms", "check_alike", "finish", "normalizes"]

COLOURS, AFFINE = 13, 6
"""Lengths of the two parts of a program."""
_STAGES = 3
_GREY = (0.299, 0.587, 0.114)


def finish(inputs: Tensor, program: Tensor) -> Tensor:
    """Return the images as their programs want them, float32 (N, 3, H, W).

    Colours are changed inside the picture only; its padding stays as it was filled. The mean grey of contrast is that
    of the picture, too. In contrast to Pillow and torchvision nothing is rounded to whole numbers in between.

    Args:
        inputs: uint8 or float (N, 3, H, W), on a scale of 0 to 255.
        program: float32 (N, K).

    Raises:
        DataError: K is no program's length, or the images have not three channels.
    """
    length = program.shape[-1]
    if length not in (COLOURS, AFFINE, COLOURS + AFFINE) or inputs.shape[1] != 3:
        raise DataError(
            f"'finish' holds programs of length {length} for images {tuple(inputs.shape)}: it must be as a "
            "SegmentationDataset with colour jitter or normalisation makes it, for images (N, 3, H, W)"
        )
    images = torch.empty_like(inputs, dtype=torch.float32)
    # One by one, images stay in a CPU's cache through all stages: that takes half the time.
    alone = images.device.type == "cpu" and not torch.compiler.is_compiling()
    size = 1 if alone else max(1, len(images))
    for some, given, own in zip(images.split(size), inputs.split(size), program.split(size), strict=True):
        some.copy_(given)
        if length != AFFINE:
            _colour(some, own[:, :COLOURS, None, None, None])
        if length != COLOURS:
            scale, shift = own[:, -AFFINE:].reshape(-1, 2, 3, 1, 1).unbind(1)
            some.mul_(scale).add_(shift)
    return images


def apply_device_transforms(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with finished `inputs` and without `finish`; a batch without `finish` as it is.

    Where `inputs` is a list of images (3, H, W), each is finished by itself.
    """
    rest = dict(batch)
    if "inputs" not in rest or "finish" not in rest:
        return rest
    inputs, program = rest["inputs"], rest.pop("finish")
    if isinstance(inputs, Tensor):
        return {**rest, "inputs": finish(inputs, program)}
    each = [finish(image[None], own[None])[0] for image, own in zip(inputs, program, strict=True)]
    return {**rest, "inputs": each}


def normalizes(batch: Mapping[str, Any]) -> bool:
    """Say whether the batch's programs normalise its images."""
    program = batch.get("finish")
    return program is not None and program[0].shape[-1] != COLOURS


def check_alike(samples: Sequence[Any]) -> None:
    """Raise DataError if programs of some samples have other parts than those of others, or are not there.

    Collated they would break, or be lost without a word.
    """
    programs = [sample.get("finish") if isinstance(sample, Mapping) else None for sample in samples]
    if len({getattr(program, "shape", None) for program in programs}) > 1:
        raise DataError(
            "the samples of a batch come from data sets of which some change colours or normalise (SegColorJitter; "
            "SegStandardize, SegNormalize, ToTensor) and others do not: end all their transforms alike, or normalise "
            "all in the data preprocessor"
        )


def _colour(images: Tensor, program: Tensor) -> None:
    """Run the three stages in place, for which the CPU needs half the time; `program` is (N, 13, 1, 1, 1)."""
    inside = _inside(images, program[:, :4, 0])
    pixels = inside.sum((-2, -1), keepdim=True).clamp(min=1)
    for stage in range(_STAGES):
        factor, of_grey, of_mean = program[:, 4 + 3 * stage : 7 + 3 * stage].unbind(1)
        red, green, blue = images.split(1, dim=1)
        grey = (_GREY[0] * red).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2]).mul_(inside)
        mean = grey.sum((-2, -1), keepdim=True) / pixels
        images.mul_(inside * (factor - 1) + 1)
        images.add_(grey.mul_(of_grey).add_(inside * (of_mean * mean))).clamp_(0, 255)


def _inside(images: Tensor, rectangle: Tensor) -> Tensor:
    """Return 1 for pixels inside and 0 for padding, float32 (N, 1, H, W); `rectangle` is (N, 4, 1, 1)."""
    left, top, right, bottom = rectangle[:, :, None].unbind(1)
    row = torch.arange(images.shape[-2], device=images.device).view(1, 1, -1, 1)
    column = torch.arange(images.shape[-1], device=images.device).view(1, 1, 1, -1)
    rows, columns = (row >= top) & (row < bottom), (column >= left) & (column < right)
    return rows.float() * columns.float()
