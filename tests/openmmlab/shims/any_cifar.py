"""Let mmpretrain accept CIFAR-10 files other than the ones that it downloads."""

from mmpretrain.datasets import CIFAR10

CIFAR10._check_integrity = lambda self: True
