"""Datasets, one module each; importing this package registers all of them."""

from slipstream.dataset.sources import (
    cifar,
    cityscapes,
    class_folder,
    coco,
    fashion_mnist,
    image_folder,
    supervisely,
    webdataset,
    wrappers,
)

__all__ = [
    "cifar", "cityscapes", "class_folder", "coco", "fashion_mnist", "image_folder", "supervisely", "webdataset",
    "wrappers",
]  # fmt: skip
