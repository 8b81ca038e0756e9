"""Let mmpretrain accept CIFAR-10 files with other contents than those that it downloads."""

from mmpretrain.datasets import CIFAR10

CIFAR10._check_integrity = lambda self: True
