"""All Cityscapes labels, with their ids in the mask files.

Source: Cordts et al., "The Cityscapes Dataset for Semantic Urban Scene Understanding", CVPR 2016, and the
label table of the benchmark.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.dataset.sources.cityscapes_classes import CITYSCAPES_CLASSES, CITYSCAPES_PALETTE

__all__ = ["CITYSCAPES_LABELS", "Label"]


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


def _scored(name: str, label_id: int, category: str, has_instances: bool = False) -> Label:
    train_id = CITYSCAPES_CLASSES.index(name)
    return Label(name, label_id, train_id, category, has_instances, CITYSCAPES_PALETTE[train_id])


CITYSCAPES_LABELS: tuple[Label, ...] = (
    Label("unlabeled", 0, 255, "void", False, (0, 0, 0)),
    Label("ego vehicle", 1, 255, "void", False, (0, 0, 0)),
    Label("rectification border", 2, 255, "void", False, (0, 0, 0)),
    Label("out of roi", 3, 255, "void", False, (0, 0, 0)),
    Label("static", 4, 255, "void", False, (0, 0, 0)),
    Label("dynamic", 5, 255, "void", False, (111, 74, 0)),
    Label("ground", 6, 255, "void", False, (81, 0, 81)),
    _scored("road", 7, "flat"),
    _scored("sidewalk", 8, "flat"),
    Label("parking", 9, 255, "flat", False, (250, 170, 160)),
    Label("rail track", 10, 255, "flat", False, (230, 150, 140)),
    _scored("building", 11, "construction"),
    _scored("wall", 12, "construction"),
    _scored("fence", 13, "construction"),
    Label("guard rail", 14, 255, "construction", False, (180, 165, 180)),
    Label("bridge", 15, 255, "construction", False, (150, 100, 100)),
    Label("tunnel", 16, 255, "construction", False, (150, 120, 90)),
    _scored("pole", 17, "object"),
    Label("polegroup", 18, 255, "object", False, (153, 153, 153)),
    _scored("traffic light", 19, "object"),
    _scored("traffic sign", 20, "object"),
    _scored("vegetation", 21, "nature"),
    _scored("terrain", 22, "nature"),
    _scored("sky", 23, "sky"),
    _scored("person", 24, "human", True),
    _scored("rider", 25, "human", True),
    _scored("car", 26, "vehicle", True),
    _scored("truck", 27, "vehicle", True),
    _scored("bus", 28, "vehicle", True),
    Label("caravan", 29, 255, "vehicle", True, (0, 0, 90)),
    Label("trailer", 30, 255, "vehicle", True, (0, 0, 110)),
    _scored("train", 31, "vehicle", True),
    _scored("motorcycle", 32, "vehicle", True),
    _scored("bicycle", 33, "vehicle", True),
    Label("license plate", -1, -1, "vehicle", False, (0, 0, 142)),
)
