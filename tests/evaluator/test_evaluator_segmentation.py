from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators import DEVICE, no_waiting
from slipstream.errors import DataError
from slipstream.evaluator import IoUMetric
from slipstream.evaluator.segmentation import _add_in_copies

torchmetrics = pytest.importorskip("torchmetrics")


def _evaluate(preds, targets, **options):
    metric = IoUMetric(**options)
    metric.process(None, {"preds": preds, "targets": targets})
    return metric.evaluate(len(targets))


def _nanmean(values):
    values = [v for v in values if v is not None]
    return float(np.mean(values)) if values else float("nan")


def _reference(preds, targets, classes, ignore):
    """Return the metrics, computed from boolean masks, one class at a time."""
    keep = targets != ignore
    preds, targets = preds[keep], targets[keep]
    iou, acc, dice, precision = [], [], [], []
    for c in range(classes):
        p, t = preds == c, targets == c
        hit = np.float64((p & t).sum())
        iou.append(100 * hit / (p | t).sum() if (p | t).any() else None)
        acc.append(100 * hit / t.sum() if t.any() else None)
        dice.append(100 * 2 * hit / (p.sum() + t.sum()) if (p | t).any() else None)
        precision.append(100 * hit / p.sum() if p.any() else None)
    return {
        "aAcc": 100 * np.float64((preds == targets).mean()) if len(targets) else float("nan"),
        "mAcc": _nanmean(acc),
        "mIoU": _nanmean(iou),
        "mDice": _nanmean(dice),
        "mFscore": _nanmean(dice),
        "mPrecision": _nanmean(precision),
        "mRecall": _nanmean(acc),
    }


@st.composite
def _maps(draw):
    classes = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3)))
    used = draw(st.integers(1, classes))  # the other classes are absent
    targets = rng.integers(0, used, shape)
    targets[rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 255
    return classes, rng.integers(0, used, shape), targets


@settings(max_examples=60, deadline=None)
@given(_maps(), st.sampled_from([torch.uint8, torch.int32, torch.int64]))
def test_metrics_match_the_reference(maps, dtype):
    classes, preds, targets = maps
    got = _evaluate(
        torch.from_numpy(preds),
        torch.from_numpy(targets).to(dtype),
        num_classes=classes,
        iou_metrics=("mIoU", "mDice", "mFscore"),
    )
    assert got == pytest.approx(_reference(preds, targets, classes, 255), rel=1e-12, nan_ok=True)


@settings(max_examples=20, deadline=None)
@given(_maps(), st.integers(1, 4))
def test_metrics_do_not_depend_on_batches(maps, size):
    classes, preds, targets = (torch.from_numpy(m) if isinstance(m, np.ndarray) else m for m in maps)
    metric = IoUMetric(num_classes=classes, per_class=True)
    for start in range(0, len(preds), size):
        metric.process(None, (preds[start : start + size], targets[start : start + size]))
    whole = _evaluate(preds, targets, num_classes=classes, per_class=True)
    assert metric.evaluate(len(preds)) == pytest.approx(whole, rel=0, nan_ok=True)


def test_miou_agrees_with_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    preds = torch.randint(0, 5, (4, 16, 16), generator=generator)
    targets = torch.randint(0, 5, (4, 16, 16), generator=generator)
    targets[:, :3] = 255
    peer = torchmetrics.classification.MulticlassJaccardIndex(5, ignore_index=255)
    got = _evaluate(preds, targets, num_classes=5)
    assert got["mIoU"] == pytest.approx(100 * peer(preds, targets).item(), rel=1e-5)


def test_scores_are_reduced_by_argmax():
    scores = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 3, (2, 4, 4))
    assert _evaluate(scores, targets, num_classes=3) == _evaluate(scores.argmax(1), targets, num_classes=3)


def test_classes_and_ignore_index_come_from_the_dataset():
    metric = IoUMetric(per_class=True)
    metric.dataset_meta = {"classes": ("road", "sky"), "ignore_index": 9}
    metric.process(None, (torch.tensor([[[0, 1, 1]]]), torch.tensor([[[0, 0, 9]]])))
    got = metric.evaluate(1)
    assert (got["IoU/road"], got["IoU/sky"]) == (50.0, 0.0)


def test_labels_out_of_range_raise_an_error():
    metric = IoUMetric(num_classes=3)
    metric.process(None, (torch.tensor([[[0, 4, -1, 0]]]), torch.tensor([[[3, 0, 0, -7]]])))
    with pytest.raises(DataError, match=r"outside 0\.\.2 \(2 targets, 2 predictions\); map"):
        metric.evaluate(1)


def test_ignored_pixels_can_have_any_prediction():
    got = _evaluate(torch.tensor([[[0, 77]]]), torch.tensor([[[0, 255]]]), num_classes=2)
    assert got["aAcc"] == 100.0


def test_counts_start_at_zero_after_an_error_and_after_an_evaluation():
    metric = IoUMetric(num_classes=2)
    metric.process(None, (torch.tensor([[[0]]]), torch.tensor([[[5]]])))
    with pytest.raises(DataError):
        metric.evaluate(1)
    for label in (0, 1):
        metric.process(None, (torch.tensor([[[1]]]), torch.tensor([[[label]]])))
        assert metric.evaluate(1)["aAcc"] == 100.0 * label


@pytest.mark.parametrize("pixels", [0, 1, 63, 64, 65, 4095])
def test_counts_in_copies_match_bincount(pixels):
    cells = torch.randint(0, 12, (pixels,))
    counts = torch.arange(12)
    _add_in_copies(counts, cells, padding_bin=9)
    assert torch.equal(counts, torch.arange(12) + torch.bincount(cells, minlength=12))


@pytest.mark.gpu
def test_device_counts_match_cpu_without_synchronization():
    preds, targets = torch.randint(0, 7, (2, 3, 65, 63))
    targets[:, :5] = 255
    metric = IoUMetric(num_classes=7)
    on_device = preds.to(DEVICE), targets.to(DEVICE)
    metric.process(None, on_device)
    metric.evaluate(3)
    with no_waiting():
        metric.process(None, on_device)
    assert metric.evaluate(3) == _evaluate(preds, targets, num_classes=7)
