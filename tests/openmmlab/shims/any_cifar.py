"""Let mmpretrain accept CIFAR-10 files that differ from the files that it downloads."""

from mmpretrain.datasets import CIFAR10

CIFAR10._check_integrity = lambda self: True
