"""Segmentation metrics computed from a confusion matrix on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.evaluator.metric import CountingMetric, describe
from slipstream.registry import METRICS

if TYPE_CHECKING:
    import numpy.typing as npt

_IOU_METRICS = ("mIoU", "mDice", "mFscore")
_DEFAULT_IGNORE_INDEX = 255
_NUM_COPIES = 64  # at least the warp size of the GPU (32, or 64 on AMD)


@METRICS.register_module()
class IoUMetric(CountingMetric):
    """Intersection over union and related metrics, in percent (0 to 100), over all pixels in the dataset.

    For each class, TP is the number of correctly predicted pixels, T is the number of pixels in the targets, and P is
    the number of pixels in the predictions. The metric always reports `aAcc`, the fraction of correct pixels, and
    `mAcc`, the mean of TP / T. Each entry of `iou_metrics` adds values:

    - `mIoU`: the mean of TP / (T + P - TP);
    - `mDice`: the mean of 2 TP / (T + P);
    - `mFscore`: `mFscore` (the F1 score, which equals Dice), `mPrecision` (TP / P) and `mRecall` (TP / T).

    Means are taken over the classes whose denominator is not zero; a mean over no classes is NaN. (Everingham et al.,
    The PASCAL Visual Object Classes Challenge, IJCV 2010, section 4.3.)

    The predictions are class ids `(N, H, W)` or scores `(N, classes, H, W)`. The targets are class ids `(N, H, W)` of
    any integer dtype.

    Args:
        iou_metrics: which of `mIoU`, `mDice` and `mFscore` to report.
        ignore_index: target id of ignored pixels. Default: `ignore_index` in the dataset's metainfo (if it is None,
            no pixels are ignored), or 255 if the metainfo does not contain this key.
        num_classes: number of classes. Default: the length of the dataset's `classes`.
        per_class: also report `IoU/<class name>` for every class.
        kwargs: see `BaseMetric`.

    Raises:
        ConfigError: if `iou_metrics` contains an unknown name, or the number of classes is unknown.
        DataError: if the shapes do not match, or (in `evaluate`) class ids are out of range.
    """

    def __init__(
        self,
        iou_metrics: tuple[str, ...] = ("mIoU",),
        ignore_index: int | None = None,
        num_classes: int | None = None,
        per_class: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name in iou_metrics:
            if name not in _IOU_METRICS:
                hint = did_you_mean(name, _IOU_METRICS)
                raise ConfigError(
                    f"unknown metric {name!r}{hint}; known metrics: {', '.join(_IOU_METRICS)}", "iou_metrics"
                )
        self.iou_metrics = tuple(iou_metrics)
        self.per_class = per_class
        self._ignore_index = ignore_index
        self._num_classes = num_classes

    @property
    def num_classes(self) -> int:
        """Number of classes: the argument, or the length of the dataset's `classes`."""
        if self._num_classes is not None:
            return self._num_classes
        classes = (self.dataset_meta or {}).get("classes")
        if not classes:
            raise ConfigError(
                "IoUMetric requires the number of classes; set num_classes, "
                "or set 'classes' in the dataset's metainfo"
            )
        return len(classes)

    @property
    def ignore_index(self) -> int | None:
        """Target id of ignored pixels, or None if no pixels are ignored."""
        if self._ignore_index is not None:
            return self._ignore_index
        return (self.dataset_meta or {}).get("ignore_index", _DEFAULT_IGNORE_INDEX)

    def num_counts(self) -> int:
        """Return the number of counts.

        There is one for each cell of the confusion matrix, one for the ignored pixels, one for the invalid targets, and
        one for the invalid predictions.
        """
        return self.num_classes**2 + 3

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the pixels of one batch to the confusion matrix; rows are targets, columns are predictions."""
        classes = self.num_classes
        ignored = classes**2
        preds, targets = self._class_ids(preds, targets).long(), targets.long()
        # Ignored and invalid pixels are counted in separate bins. Boolean indexing and torch.bincount would both
        # synchronize with the device, because their output size depends on the values.
        cells = targets * classes + preds
        cells.masked_fill_((preds < 0) | (preds >= classes), ignored + 2)
        cells.masked_fill_((targets < 0) | (targets >= classes), ignored + 1)
        if self.ignore_index is not None:
            cells.masked_fill_(targets == self.ignore_index, ignored)
        cells = cells.flatten()
        if cells.device.type == "cpu" or len(counts) * _NUM_COPIES > len(cells):
            counts.scatter_add_(0, cells, counts.new_ones(1).expand_as(cells))
        else:
            _add_in_copies(counts, cells, ignored)

    def _class_ids(self, preds: Tensor, targets: Tensor) -> Tensor:
        """Return the predicted class ids, in the shape of the targets."""
        has_scores = preds.ndim == targets.ndim + 1 and preds.shape[1] == self.num_classes
        ids = preds.argmax(dim=1) if has_scores else preds
        if ids.shape != targets.shape or ids.is_floating_point():
            raise DataError(
                f"IoUMetric got {describe(preds)} as preds and {describe(targets)} as targets; it requires "
                f"scores (N, {self.num_classes}, H, W) or class ids (N, H, W) with the size of the targets"
            )
        return ids

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the metrics in percent from the counts.

        Raises:
            DataError: if targets or predictions out of range were counted.
        """
        matrix = self.matrix(results)
        hit, truth, predicted = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
        iou = _percent(hit, truth + predicted - hit)
        recall = _mean(_percent(hit, truth))
        metrics = {"aAcc": float(_percent(hit.sum(), matrix.sum())), "mAcc": recall}
        if "mIoU" in self.iou_metrics:
            metrics["mIoU"] = _mean(iou)
        dice = _mean(_percent(2 * hit, truth + predicted))
        if "mDice" in self.iou_metrics:
            metrics["mDice"] = dice
        if "mFscore" in self.iou_metrics:
            metrics.update(mFscore=dice, mPrecision=_mean(_percent(hit, predicted)), mRecall=recall)
        if self.per_class:
            metrics.update(zip((f"IoU/{name}" for name in self.class_names()), iou.tolist(), strict=True))
        return metrics

    def matrix(self, results: list[Any]) -> npt.NDArray[np.float64]:
        """Return the confusion matrix from the counts; rows are targets, columns are predictions.

        Raises:
            DataError: if targets or predictions out of range were counted.
        """
        classes = self.num_classes
        bad_targets, bad_preds = results[-2:]
        if bad_targets or bad_preds:
            raise DataError(
                f"{type(self).__name__} found class ids outside 0..{classes - 1} ({bad_targets} targets, {bad_preds} "
                f"predictions); map the labels to that range or to the ignore_index ({self.ignore_index})"
            )
        matrix = np.array(results[: classes**2], dtype=np.float64).reshape(classes, classes)
        self.confusion = matrix.astype(np.int64).tolist()
        return matrix

    def class_names(self) -> list[str]:
        """Return the dataset's class names, or the class ids if there is not one name per class."""
        names = list((self.dataset_meta or {}).get("classes") or ())
        return names if len(names) == self.num_classes else [str(i) for i in range(self.num_classes)]


def _add_in_copies(counts: Tensor, cells: Tensor, padding_bin: int) -> None:
    """Count `cells` in several copies of the bins, and add the sum of the copies to `counts`.

    Adjacent pixels often have the same class. On an accelerator, threads that add to the same bin wait for each other,
    so adjacent pixels are counted in different copies.
    """
    padding = -len(cells) % _NUM_COPIES
    rows = F.pad(cells, (0, padding), value=padding_bin).view(-1, _NUM_COPIES)
    copies = counts.new_zeros(len(counts), _NUM_COPIES)
    copies.scatter_add_(0, rows, copies.new_ones(1, 1).expand_as(rows))
    counts.add_(copies.sum(1))
    counts[padding_bin].sub_(padding)


def _percent(part: npt.ArrayLike, total: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return 100 * part / total, or NaN where `total` is zero."""
    part, total = np.asarray(part, np.float64), np.asarray(total, np.float64)
    percent = np.full_like(part, np.nan)
    np.divide(100 * part, total, out=percent, where=total > 0)
    return percent


def _mean(values: npt.NDArray[np.float64]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if valid.size else float("nan")
