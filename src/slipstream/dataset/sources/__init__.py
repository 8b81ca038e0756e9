"""Datasets, one module each; importing this package registers all of them."""

from slipstream.dataset.sources import (
    cifar10,
    cityscapes,
    class_folder,
    fashion_mnist,
    image_folder,
    wrappers,
)

__all__ = ["cifar10", "cityscapes", "class_folder", "fashion_mnist", "image_folder", "wrappers"]
