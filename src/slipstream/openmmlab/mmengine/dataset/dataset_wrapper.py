"""Dataset wrappers."""

from slipstream.dataset.sources.wrappers import ClassBalancedDataset, ConcatDataset, RepeatDataset

__all__ = ["ClassBalancedDataset", "ConcatDataset", "RepeatDataset"]
