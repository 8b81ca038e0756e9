"""A list of transforms applied to a sample: pixels moved in one go, colours and normalisation left to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from slipstream.dataset.transforms.crop import Geometric, Sample, Window
from slipstream.dataset.transforms.geometry import Affine, SegColorJitter, SegConvertToTensor
from slipstream.errors import ConfigError, DataError

__all__ = ["Composed", "Transform", "apply_transforms", "check_transforms", "compose"]

Transform: TypeAlias = Callable[[Sample, np.random.Generator], Sample]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Composed:
    """A sample, and what transforms will have made of it."""

    sample: Sample
    window: Window
    """How the sample's pixels are moved."""
    program: Floats | None
    """What `slipstream.dataset.transforms.device_transforms` has to do on the device, if anything."""

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the transformed sample as tensors of its own, as `apply_transforms` does."""
        planes, mask = self.window.render(self.sample)
        packed = {"inputs": torch.from_numpy(planes), "targets": torch.from_numpy(mask)}
        return packed if self.program is None else {**packed, "finish": torch.from_numpy(self.program)}


def apply_transforms(
    transforms: Sequence[Transform], sample: Sample, rng: np.random.Generator, name: str = "the sample"
) -> dict[str, torch.Tensor]:
    """Return the transformed sample as tensors of its own.

    That is `inputs`, uint8 (3, H, W), `targets`, uint8 (H, W), and, where the transforms end in colour jitter or
    normalisation, `finish`, the float32 parameters of `slipstream.dataset.transforms.device_transforms`. Random
    numbers are drawn in the order of the transforms. Padding keeps its colour. Contrast is changed about the mean of
    the visible pixels. A jitter that precedes a user's function or another jitter is applied at once, as Pillow does.

    Raises:
        DataError: the sample is not as it must be, from the beginning or after a function of one's own.
        ConfigError: as `check_transforms`.
    """
    return compose(transforms, sample, rng, name).packed()


def compose(
    transforms: Sequence[Transform], sample: Sample, rng: np.random.Generator, name: str = "the sample"
) -> Composed:
    """Return what `apply_transforms` packs."""
    plan = _read(transforms)
    window, changes = _window(sample, name), None
    for position, transform in enumerate(plan.pixels):
        if position == plan.deferred:
            changes = transform.draw(rng)  # type: ignore[attr-defined]
        elif not isinstance(transform, Geometric):
            sample = transform(window.rendered(sample), rng)
            window = _window(sample, name)
        elif (placed := transform.place(window, rng)) is not None:
            window = placed
        else:
            sample = window.rendered(sample)
            window = transform.alone(sample["mask"], rng)
    parts = [] if changes is None else [_colours(window, changes)]
    if plan.affine:
        parts.append(_affine(plan.affine))
    return Composed(sample, window, np.concatenate(parts) if parts else None)


def check_transforms(transforms: Sequence[Transform]) -> None:
    """Raise ConfigError if something follows normalisation, or SegConvertToTensor, that cannot."""
    _read(transforms)


@dataclass(frozen=True)
class _Plan:
    pixels: Sequence[Transform]
    """What concerns pixels."""
    deferred: int
    """Which of them is the colour jitter that is left to the device, -1 if none."""
    affine: Sequence[Affine]
    """The normalisation, for the device."""


def _read(transforms: Sequence[Transform]) -> _Plan:
    end = len(transforms)
    if end and isinstance(transforms[-1], SegConvertToTensor):
        end -= 1
    start = end
    while start and isinstance(transforms[start - 1], Affine):
        start -= 1
    pixels = transforms[:start]
    _check_order(pixels, transforms)
    deferred = start - 1
    while deferred >= 0 and isinstance(pixels[deferred], Geometric):
        deferred -= 1
    if deferred >= 0 and not isinstance(pixels[deferred], SegColorJitter):
        deferred = -1
    return _Plan(pixels, deferred, transforms[start:end])  # type: ignore[arg-type]


def _check_order(pixels: Sequence[Transform], transforms: Sequence[Transform]) -> None:
    for position, transform in enumerate(pixels):
        if isinstance(transform, Affine | SegConvertToTensor):
            after = transforms[position + 1]
            raise ConfigError(
                f"{type(transform).__name__} stands before {getattr(after, '__name__', type(after).__name__)}, but is "
                "done on the device when all else is: only SegStandardize, SegNormalize and then SegConvertToTensor "
                "may end the list",
                f"transforms[{position}]",
            )


def _window(sample: Sample, name: str) -> Window:
    """Return the whole sample as a window, if it is as it must be."""
    image, mask = sample["image"], sample["mask"]
    if not image.dtype == mask.dtype == np.uint8 or mask.ndim != 2 or image.shape != (*mask.shape, 3):
        raise DataError(
            f"{name}: image {image.dtype} {image.shape} and mask {mask.dtype} {mask.shape} must be uint8 (H, W, 3) "
            "and uint8 (H, W); check what load() and your own transforms return"
        )
    return Window.whole(mask)


def _colours(window: Window, changes: Sequence[tuple[int, float]]) -> Floats:
    """Return the first part of a program: the picture's rectangle, and the three stages."""
    stages = np.array([[1, 0, 0]] * 3, np.float32)
    for stage, (kind, factor) in zip(stages, changes, strict=False):
        stage[:] = factor, (1 - factor) * (kind == 2), (1 - factor) * (kind == 1)
    return np.concatenate([np.array(window.picture, np.float32), stages.ravel()])


def _affine(transforms: Sequence[Affine]) -> Floats:
    scale, shift = np.ones(3), np.zeros(3)
    for transform in transforms:
        scale, shift = transform.after(scale, shift)
    return np.concatenate([scale, shift]).astype(np.float32)
