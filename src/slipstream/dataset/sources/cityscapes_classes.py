"""The 19 training classes of Cityscapes: their names and colors, and the id of pixels that are not scored.

Source: Cordts et al., "The Cityscapes Dataset for Semantic Urban Scene Understanding", CVPR 2016; ids and
colors are the public train ids and palette of the benchmark.
"""

from __future__ import annotations

__all__ = ["CITYSCAPES_CLASSES", "CITYSCAPES_IGNORE_INDEX", "CITYSCAPES_PALETTE"]

CITYSCAPES_CLASSES: tuple[str, ...] = (
    "road",
    "sidewalk",
    "building",
    "wall",
    "fence",
    "pole",
    "traffic light",
    "traffic sign",
    "vegetation",
    "terrain",
    "sky",
    "person",
    "rider",
    "car",
    "truck",
    "bus",
    "train",
    "motorcycle",
    "bicycle",
)

CITYSCAPES_PALETTE: tuple[tuple[int, int, int], ...] = (
    (128, 64, 128),
    (244, 35, 232),
    (70, 70, 70),
    (102, 102, 156),
    (190, 153, 153),
    (153, 153, 153),
    (250, 170, 30),
    (220, 220, 0),
    (107, 142, 35),
    (152, 251, 152),
    (70, 130, 180),
    (220, 20, 60),
    (255, 0, 0),
    (0, 0, 142),
    (0, 0, 70),
    (0, 60, 100),
    (0, 80, 100),
    (0, 0, 230),
    (119, 11, 32),
)

CITYSCAPES_IGNORE_INDEX = 255
