"""StreetScenes: synthetic street images with exact Cityscapes label maps, for tests and benchmarks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.dataset.sources.base import SegmentationDataset, Transform, check_index
from slipstream.dataset.sources.cityscapes_labels import (
    CITYSCAPES_CLASSES,
    CITYSCAPES_IGNORE_INDEX,
    CITYSCAPES_PALETTE,
)
from slipstream.registry import DATASETS
from slipstream.typecheck import NonNegativeInt, PositiveInt, Rule, check
from slipstream.zoo.street_scenes.render import render
from slipstream.zoo.street_scenes.scene import Scene

_Side = Annotated[int, Rule(lambda value: 32 <= value <= 16384, "between 32 and 16384")]


def draw_street_scene(
    seed: int, index: int, size: tuple[int, int] = (256, 512)
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw scene `index` of the series generated from `seed`, as seen from a car on the street.

    Identical arguments produce identical bytes, except that the last bit of a color may differ between platforms with
    different floating-point rounding. A different `size` renders the same scene (stretched if the aspect ratio is not
    2:1), with finer or coarser textures and different sensor noise.

    All classes have similar colors, so networks must use shape and context.

    Returns:
        The image, uint8 (H, W, 3) RGB, and the Cityscapes train ids, uint8 (H, W), with 255 for bins and the hood
        of the car that carries the camera. The labels are exact, because the image and the labels are rendered
        from the same polygons.

    Raises:
        ConfigError: if the size is not a pair of ints between 32 and 16384.
        ValueError: if the seed or the index is negative.
    """
    size = _checked(size)
    rng = np.random.default_rng((seed, index))
    return render(Scene(Random(int(rng.integers(2**63)))), size, rng)


@DATASETS.register_module()
class StreetScenes(SegmentationDataset):
    """A dataset of `length` synthetic street scenes with the 19 classes of Cityscapes.

    Args:
        size: height and width of the images in pixels, at least 32 each. Scenes are designed for images that are twice
            as wide as they are high.
        length: number of scenes. Scene i does not depend on the length.
        seed: seed from which the scenes are generated. Use a different seed for validation.
        transforms, cache_in_memory, cache: see `SegmentationDataset`.

    Raises:
        ConfigError: if the size, the length or the seed is invalid.
    """

    def __init__(
        self,
        size: tuple[int, int] = (256, 512),
        length: int = 1000,
        seed: int = 0,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_in_memory: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        super().__init__(transforms, cache_in_memory, cache)
        self.size = _checked(size)
        self.length = check(length, PositiveInt, "length")
        self.seed = check(seed, NonNegativeInt, "seed")
        self.metainfo: dict[str, Any] = {
            "classes": CITYSCAPES_CLASSES,
            "palette": [list(color) for color in CITYSCAPES_PALETTE],
            "ignore_index": CITYSCAPES_IGNORE_INDEX,
        }

    def __len__(self) -> int:
        return self.length

    def load(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return image `index`, uint8 (H, W, 3), and its mask, uint8 (H, W).

        Raises:
            IndexError: if the index is out of range.
        """
        check_index(self, index)
        return draw_street_scene(self.seed, int(index), self.size)

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return a key that contains the scene's seed, index and size, and the version of the drawing code."""
        height, width = self.size
        return f"street scene {self.seed}-{index} {height}x{width}", _drawing_version()


@functools.cache
def _drawing_version() -> str:
    """Return a digest of the drawing modules, so that a cache does not return images drawn by a different version."""
    digest = hashlib.blake2b(np.__version__.encode(), digest_size=8)
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()


def _checked(size: Any) -> tuple[int, int]:
    """Return the height and width as a tuple."""
    height, width = check(size, tuple[_Side, _Side], "size")
    return height, width
