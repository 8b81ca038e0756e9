"""Save images of predictions next to the ground truth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.dataset.loading.loader import length
from slipstream.dist import is_main_process
from slipstream.errors import DataError
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS
from slipstream.typecheck import PositiveInt, check

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class SegVisualizationHook(Hook):
    """Save the image, ground truth and prediction of some validation samples as one PNG file.

    The samples are spread across the validation data. The hook overwrites `predictions.png` in the work_dir and also
    passes the image to the visualizer.

    Args:
        num_samples: number of samples to show.
        interval: number of validation runs between images.
    """

    priority = "LOW"

    def __init__(self, num_samples: PositiveInt = 4, interval: PositiveInt = 1) -> None:
        for name, value in {"num_samples": num_samples, "interval": interval}.items():
            check(value, PositiveInt, name)
        self.num_samples, self.interval = num_samples, interval
        self._validations = 0
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def before_val_epoch(self, runner: Runner) -> None:
        """Clear the samples from the previous validation run, and select batches spread across the data."""
        self._rows = []
        batches = length(runner.val_dataloader) or self.num_samples  # without a length, use the first batches
        self._batch_interval = max(1, batches // self.num_samples)
        self._samples_per_batch = math.ceil(self.num_samples / batches)

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Store the first samples of a selected batch."""
        missing = min(self.num_samples - len(self._rows), self._samples_per_batch)
        if missing <= 0 or batch_idx % self._batch_interval or not is_main_process():
            return
        try:
            rows = zip(data_batch["inputs"], outputs["targets"], outputs["preds"], strict=True)
        except (TypeError, KeyError) as error:
            raise DataError(
                "SegVisualizationHook requires batches with 'inputs' and predictions with 'preds' and 'targets', "
                "as returned by slipstream's Segmentor; remove the hook for other models"
            ) from error
        self._rows += [row for row, _ in zip(rows, range(missing), strict=False)]

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Draw the selected samples."""
        self._validations += 1
        if not self._rows or self._validations % self.interval:
            return
        from slipstream.visualization.segmentation import colorize, contact_sheet, ignored_color

        meta = getattr(runner.val_dataloader.dataset, "metainfo", {})
        palette, ignore = meta.get("palette"), meta.get("ignore_index")
        if palette is None or "classes" not in meta:
            raise DataError(
                "SegVisualizationHook requires a dataset with 'palette' and 'classes' in its metainfo; add them, or "
                "remove the hook"
            )
        rows = []
        for image, target, prediction in self._rows:
            truth, predicted = _numpy(target), _numpy(prediction)
            picture = _numpy(image).transpose(1, 2, 0).astype(np.uint8)
            rows.append([picture, colorize(truth, palette, ignore), colorize(predicted, palette, ignore)])
        titles = ["image", "truth", "prediction"]
        legend = list(zip(meta["classes"], palette, strict=True))
        if ignore is not None:
            legend.append(("(ignored)", ignored_color(palette)))
        sheet = contact_sheet(rows, titles, legend=legend)
        path = Path(runner.work_dir) / "predictions.png"
        sheet.save(path)
        runner.visualizer.add_image("predictions", np.asarray(sheet), step=runner.iter)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().to("cpu", torch.int32).numpy()
