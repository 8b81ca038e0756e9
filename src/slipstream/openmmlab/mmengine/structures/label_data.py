"""`LabelData`: the labels of an image."""

from __future__ import annotations

import torch

from slipstream.openmmlab.mmengine.structures.base_data_element import BaseDataElement

__all__ = ["LabelData"]


class LabelData(BaseDataElement):
    """The labels of an image, with methods that convert between class ids and one-hot vectors."""

    @staticmethod
    def onehot_to_label(onehot: torch.Tensor) -> torch.Tensor:
        """Convert a 1-dim tensor of zeros and ones to class ids, which are the indices of the ones.

        Raises:
            ValueError: if the tensor does not have exactly one dimension, or contains values outside [0, 1].
        """
        assert isinstance(onehot, torch.Tensor)
        if onehot.ndim != 1 or onehot.max().item() > 1 or onehot.min().item() < 0:
            raise ValueError("a one-hot vector must have one dimension and values between 0 and 1")
        return onehot.nonzero().squeeze(-1)

    @staticmethod
    def label_to_onehot(label: torch.Tensor, num_classes: int) -> torch.Tensor:
        """Convert class ids to a vector of length `num_classes` with ones at these ids and zeros elsewhere."""
        assert isinstance(label, torch.Tensor)
        assert not label.numel() or int(label.max()) < num_classes
        onehot = label.new_zeros((num_classes,))
        onehot[label] = 1
        return onehot
