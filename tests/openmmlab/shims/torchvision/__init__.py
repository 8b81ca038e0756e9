"""A replacement for torchvision in tests: the names that mmpretrain imports, without their functionality.

The package index has no torchvision wheel for CPU builds of torch. mmpretrain imports torchvision for its transforms,
which the stock configurations for CIFAR-10 do not use.
"""

from torchvision import ops, transforms

__all__ = ["ops", "transforms"]
__version__ = "0.28.0"
