"""The labels of Cityscapes, and its 19 training classes.

Source: Cordts et al., "The Cityscapes Dataset for Semantic Urban Scene Understanding", CVPR 2016, and the label table
of the benchmark.
"""

from __future__ import annotations

from typing import NamedTuple


class Label(NamedTuple):
    """One Cityscapes label.

    `id` is the value of the label in `*_labelIds.png`. `train_id` is 255 or -1 if the label is not scored.
    """

    name: str
    id: int
    train_id: int
    category: str
    has_instances: bool
    color: tuple[int, int, int]


CITYSCAPES_LABELS: tuple[Label, ...] = (
    Label("unlabeled", 0, 255, "void", False, (0, 0, 0)),
    Label("ego vehicle", 1, 255, "void", False, (0, 0, 0)),
    Label("rectification border", 2, 255, "void", False, (0, 0, 0)),
    Label("out of roi", 3, 255, "void", False, (0, 0, 0)),
    Label("static", 4, 255, "void", False, (0, 0, 0)),
    Label("dynamic", 5, 255, "void", False, (111, 74, 0)),
    Label("ground", 6, 255, "void", False, (81, 0, 81)),
    Label("road", 7, 0, "flat", False, (128, 64, 128)),
    Label("sidewalk", 8, 1, "flat", False, (244, 35, 232)),
    Label("parking", 9, 255, "flat", False, (250, 170, 160)),
    Label("rail track", 10, 255, "flat", False, (230, 150, 140)),
    Label("building", 11, 2, "construction", False, (70, 70, 70)),
    Label("wall", 12, 3, "construction", False, (102, 102, 156)),
    Label("fence", 13, 4, "construction", False, (190, 153, 153)),
    Label("guard rail", 14, 255, "construction", False, (180, 165, 180)),
    Label("bridge", 15, 255, "construction", False, (150, 100, 100)),
    Label("tunnel", 16, 255, "construction", False, (150, 120, 90)),
    Label("pole", 17, 5, "object", False, (153, 153, 153)),
    Label("polegroup", 18, 255, "object", False, (153, 153, 153)),
    Label("traffic light", 19, 6, "object", False, (250, 170, 30)),
    Label("traffic sign", 20, 7, "object", False, (220, 220, 0)),
    Label("vegetation", 21, 8, "nature", False, (107, 142, 35)),
    Label("terrain", 22, 9, "nature", False, (152, 251, 152)),
    Label("sky", 23, 10, "sky", False, (70, 130, 180)),
    Label("person", 24, 11, "human", True, (220, 20, 60)),
    Label("rider", 25, 12, "human", True, (255, 0, 0)),
    Label("car", 26, 13, "vehicle", True, (0, 0, 142)),
    Label("truck", 27, 14, "vehicle", True, (0, 0, 70)),
    Label("bus", 28, 15, "vehicle", True, (0, 60, 100)),
    Label("caravan", 29, 255, "vehicle", True, (0, 0, 90)),
    Label("trailer", 30, 255, "vehicle", True, (0, 0, 110)),
    Label("train", 31, 16, "vehicle", True, (0, 80, 100)),
    Label("motorcycle", 32, 17, "vehicle", True, (0, 0, 230)),
    Label("bicycle", 33, 18, "vehicle", True, (119, 11, 32)),
    Label("license plate", -1, -1, "vehicle", False, (0, 0, 142)),
)
_SCORED = [label for label in CITYSCAPES_LABELS if 0 <= label.train_id < 255]
CITYSCAPES_CLASSES = tuple(label.name for label in _SCORED)
CITYSCAPES_PALETTE = tuple(label.color for label in _SCORED)
CITYSCAPES_IGNORE_INDEX = 255
