"""Small data sets in epochs of a decent length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from slipstream.dataset.wrappers import RepeatDataset
from slipstream.errors import ConfigError
from slipstream.registry import DATASETS

__all__ = ["AtLeast"]


@DATASETS.register_module()
class AtLeast(RepeatDataset):
    """A data set as many whole times over as an epoch of at least `min_samples` samples takes.

    Args:
        dataset: a data set, or a dict that DATASETS builds.
        min_samples: the fewest samples of an epoch.
    """

    def __init__(self, dataset: Dataset[Any] | Mapping[str, Any], min_samples: int) -> None:
        if min_samples < 1:
            raise ConfigError(f"must be at least 1, not {min_samples}", "min_samples")
        built: Any = DATASETS.build(dataset) if isinstance(dataset, Mapping) else dataset
        super().__init__(built, math.ceil(min_samples / max(1, len(built))))
