"""A replacement of torchvision for tests: the names that mmpretrain imports, without their functions.

torchvision has no wheel for the CPU builds of torch in the package index. mmpretrain imports it for transforms of
torchvision, which the stock configurations for CIFAR-10 do not use.
"""

from torchvision import ops, transforms

__all__ = ["ops", "transforms"]
__version__ = "0.28.0"
