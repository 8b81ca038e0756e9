"""Apply transforms to a sample: crop and resize on the CPU, and color jitter and normalization on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from slipstream.dataset.transforms.crop import CropRegion, Geometric, Sample
from slipstream.dataset.transforms.geometry import Affine, SegColorJitter, SegConvertToTensor
from slipstream.dataset.transforms.libraries import call_transform, is_uint8
from slipstream.errors import ConfigError, DataError

Transform: TypeAlias = Callable[[Sample, np.random.Generator], Sample]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Composed:
    """A sample and its composed transforms.

    Attributes:
        region: geometric transforms of the sample.
        params: parameters of the device transforms (see `slipstream.dataset.transforms.device_transforms`), or
            None if there are no device transforms.
        normalized: the result, if a transform has converted the image to float or the mask to another type.
    """

    sample: Sample
    region: CropRegion
    params: Floats | None
    normalized: dict[str, torch.Tensor] | None = None

    def apply(self) -> dict[str, torch.Tensor]:
        """Return the transformed sample as new tensors, in the format of `apply_transforms`."""
        if self.normalized is not None:
            return self.normalized
        planes, mask = self.region.render(self.sample)
        tensors = {"inputs": torch.from_numpy(planes), "targets": torch.from_numpy(mask)}
        return tensors if self.params is None else {**tensors, "device_params": torch.from_numpy(self.params)}


def apply_transforms(
    transforms: Sequence[Transform], sample: Sample, rng: np.random.Generator, name: str = "the sample"
) -> dict[str, torch.Tensor]:
    """Return the transformed sample as new tensors.

    The keys are `inputs` (uint8, shape (3, H, W)), `targets` (uint8, shape (H, W)) and, if there are device transforms,
    `device_params`, their float32 parameters (see `slipstream.dataset.transforms.device_transforms`). Normalization is
    a device transform. Color jitter is also a device transform if only geometric transforms, normalization and
    SegConvertToTensor follow it; otherwise, it runs on the CPU with Pillow.

    Random numbers are drawn in the order of the transforms. On the device, color jitter does not affect the padding,
    and contrast changes use the mean of the visible pixels of the image, without the padding.

    Raises:
        DataError: the sample, or the output of a custom transform, has the wrong dtype or shape.
        ConfigError: see `check_transforms`.
    """
    return compose(transforms, sample, rng, name).apply()


def compose(
    transforms: Sequence[Transform], sample: Sample, rng: np.random.Generator, name: str = "the sample"
) -> Composed:
    """Compose the transforms for a sample; `Composed.apply` applies them."""
    plan = _plan(transforms)
    region, changes = _initial_region(sample, name), None
    for position, transform in enumerate(plan.pixels):
        if position == plan.jitter_index:
            changes = transform.draw(rng)  # type: ignore[attr-defined]
        elif not isinstance(transform, Geometric):
            sample = call_transform(transform, region.apply(sample), rng)
            if not all(map(is_uint8, sample.values())):
                return _normalized(sample, [*plan.pixels[position + 1 :], *plan.affine], rng, name)
            region = _initial_region(sample, name)
        elif (updated := transform.update_region(region, rng)) is not None:
            region = updated
        else:
            sample = region.apply(sample)
            region = transform.region_for(sample["mask"], rng)
    params = [] if changes is None else [_color_params(region, changes)]
    if plan.affine:
        params.append(_affine_params(plan.affine))
    return Composed(sample, region, np.concatenate(params) if params else None)


def _normalized(
    sample: dict[str, Any], rest: Sequence[Transform], rng: np.random.Generator, name: str
) -> Composed:
    """Apply the transforms after a transform of another library that normalizes the image."""
    for transform in rest:
        if type(transform).__module__.startswith("slipstream."):
            raise ConfigError(
                f"{type(transform).__name__} requires uint8 images and masks; move it before the normalization",
                "transforms",
            )
        sample = call_transform(transform, sample, rng)
    image, mask = sample["image"], torch.as_tensor(sample["mask"])
    inputs = image if isinstance(image, torch.Tensor) else torch.from_numpy(image.transpose(2, 0, 1).copy())
    if inputs.shape != (3, *mask.shape) or mask.is_floating_point():
        raise DataError(
            f"{name}: the transforms must return an image (3, H, W) and an integer mask (H, W), not "
            f"{inputs.dtype} {tuple(inputs.shape)} and {mask.dtype} {tuple(mask.shape)}"
        )
    region = CropRegion.identity(np.empty(mask.shape, np.uint8))
    return Composed(sample, region, None, {"inputs": inputs, "targets": mask})


def check_transforms(transforms: Sequence[Transform]) -> None:
    """Check the order of the transforms.

    Raises:
        ConfigError: a transform other than normalization or a final SegConvertToTensor follows normalization, or
            SegConvertToTensor is not the last transform.
    """
    _plan(transforms)


def normalization(transforms: Sequence[Transform]) -> Floats | None:
    """Return the per-channel scale and shift of the final normalization, float32 (6,), or None if there is none."""
    plan = _plan(transforms)
    return _affine_params(plan.affine) if plan.affine else None


@dataclass(frozen=True)
class _Plan:
    # Transforms that are applied to the uint8 pixels.
    pixels: Sequence[Transform]
    # Position of the color jitter that runs on the device, or -1 if there is none.
    jitter_index: int
    # Normalization, which runs on the device.
    affine: Sequence[Affine]


def _plan(transforms: Sequence[Transform]) -> _Plan:
    end = len(transforms)
    if end and isinstance(transforms[-1], SegConvertToTensor):
        end -= 1
    start = end
    while start and isinstance(transforms[start - 1], Affine):
        start -= 1
    pixels = transforms[:start]
    for position, transform in enumerate(pixels):
        if isinstance(transform, Affine | SegConvertToTensor):
            raise ConfigError(
                f"{type(transform).__name__} must be at the end of the list, because normalization runs on the device",
                f"transforms[{position}]",
            )
    jitter_index = start - 1
    while jitter_index >= 0 and isinstance(pixels[jitter_index], Geometric):
        jitter_index -= 1
    if jitter_index >= 0 and not isinstance(pixels[jitter_index], SegColorJitter):
        jitter_index = -1
    return _Plan(pixels, jitter_index, transforms[start:end])  # type: ignore[arg-type]


def _initial_region(sample: Sample, name: str) -> CropRegion:
    """Check the dtypes and shapes of the sample, and return the region that covers the whole sample."""
    image, mask = sample["image"], sample["mask"]
    if not image.dtype == mask.dtype == np.uint8 or mask.ndim != 2 or image.shape != (*mask.shape, 3):
        raise DataError(
            f"{name}: load() and transforms must return a uint8 image (H, W, 3) and a uint8 mask (H, W), not "
            f"{image.dtype} {image.shape} and {mask.dtype} {mask.shape}"
        )
    return CropRegion.identity(mask)


def _color_params(region: CropRegion, changes: Sequence[tuple[int, float]]) -> Floats:
    """Return the color parameters: the rectangle of the image without padding, and the three stages."""
    stages = np.array([[1, 0, 0]] * 3, np.float32)
    for stage, (kind, factor) in zip(stages, changes, strict=False):
        stage[:] = factor, (1 - factor) * (kind == 2), (1 - factor) * (kind == 1)
    return np.concatenate([np.array(region.image_box, np.float32), stages.ravel()])


def _affine_params(transforms: Sequence[Affine]) -> Floats:
    scale, shift = np.ones(3), np.zeros(3)
    for transform in transforms:
        scale, shift = transform.compose(scale, shift)
    return np.concatenate([scale, shift]).astype(np.float32)
