"""Dataset wrappers with MMEngine's additional methods."""

from __future__ import annotations

from typing import Any

from slipstream.dataset.sources.wrappers import ClassBalancedDataset as OwnClassBalanced
from slipstream.dataset.sources.wrappers import ConcatDataset as OwnConcat
from slipstream.dataset.sources.wrappers import RepeatDataset as OwnRepeat
from slipstream.openmmlab.mmengine.registry import DATASETS

__all__ = ["ClassBalancedDataset", "ConcatDataset", "RepeatDataset"]


@DATASETS.register_module()
class ConcatDataset(OwnConcat):
    """Slipstream's `ConcatDataset` with access to the annotation of each sample and support for negative indices."""

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return the annotation of sample `idx`."""
        dataset_index, sample_index = self._locate(idx)
        return _data_info(self.datasets[dataset_index], sample_index)

    def full_init(self) -> None:
        """Load the annotations of all datasets."""
        for dataset in self.datasets:
            _full_init(dataset)

    def _locate(self, idx: int) -> tuple[int, int]:
        return super()._locate(len(self) + idx if idx < 0 else idx)


@DATASETS.register_module()
class RepeatDataset(OwnRepeat):
    """Slipstream's `RepeatDataset` with access to the annotation of each sample."""

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return the annotation of sample `idx`."""
        return _data_info(self.dataset, int(idx) % len(self.dataset))

    def full_init(self) -> None:
        """Load the annotations of the dataset."""
        _full_init(self.dataset)


@DATASETS.register_module()
class ClassBalancedDataset(OwnClassBalanced):
    """Slipstream's `ClassBalancedDataset` with access to the annotation of each sample."""

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return the annotation of sample `idx`."""
        return _data_info(self.dataset, self.repeat_indices[idx])

    def full_init(self) -> None:
        """Load the annotations of the dataset."""
        _full_init(self.dataset)


def _data_info(dataset: Any, index: int) -> dict[str, Any]:
    info: dict[str, Any] = dataset.get_data_info(index)
    return info


def _full_init(dataset: Any) -> None:
    if hasattr(dataset, "full_init"):
        dataset.full_init()
