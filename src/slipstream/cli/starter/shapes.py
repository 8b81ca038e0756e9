"""The dataset for this project: generated images of circles and squares. Replace it with your own data."""

from typing import Any

import numpy as np

from slipstream.dataset import SegmentationDataset
from slipstream.registry import DATASETS


@DATASETS.register_module()
class Shapes(SegmentationDataset):
    """Images with one circle and one square. To use files, change `load` to read the image and the mask at `index`."""

    metainfo = {  # noqa: RUF012
        "classes": ("background", "circle", "square"),
        "palette": [[40, 40, 40], [230, 80, 60], [70, 120, 230]],
        "ignore_index": 255,  # class id of ignored pixels
    }

    def __init__(self, length: int, seed: int, transforms: Any = ()) -> None:
        super().__init__(transforms)
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def load(self, index: int) -> tuple[Any, Any]:
        """Return the image, uint8 (H, W, 3), and the class ids of its pixels, uint8 (H, W)."""
        rng = np.random.default_rng([self.seed, index])
        y, x = np.mgrid[:64, :96]
        top, left, row, column = rng.integers((4, 4, 16, 16), (40, 72, 48, 80))
        mask = np.zeros((64, 96), np.uint8)
        mask[(y >= top) & (y < top + 20) & (x >= left) & (x < left + 20)] = 2
        mask[(y - row) ** 2 + (x - column) ** 2 < 144] = 1
        image = np.array(self.metainfo["palette"])[mask] + rng.integers(-25, 26, (64, 96, 3))
        return image.clip(0, 255).astype(np.uint8), mask
