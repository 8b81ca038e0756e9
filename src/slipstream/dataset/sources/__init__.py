"""Datasets, each in its own module. Importing this package registers all of them."""

from slipstream.dataset.sources import (
    cifar,
    cityscapes,
    class_folder,
    coco,
    fashion_mnist,
    image_folder,
    streaming,
    webdataset,
    wrappers,
)

__all__ = [
    "cifar", "cityscapes", "class_folder", "coco", "fashion_mnist", "image_folder", "streaming",
    "webdataset", "wrappers",
]  # fmt: skip
