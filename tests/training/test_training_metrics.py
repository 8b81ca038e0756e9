import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.evaluator import Evaluator
from slipstream.training.metrics import Dice, IoU, PixelAccuracy, Top1, Top5

IGNORE = 19


def plain_means(preds, targets, classes=19):
    """Return mean IoU, mean Dice and pixel accuracy without ignored pixels. Classes that do not occur are skipped."""
    preds, targets = preds.numpy().reshape(-1), targets.numpy().reshape(-1)
    preds, targets = preds[targets != IGNORE], targets[targets != IGNORE]
    ious, dices = [], []
    for c in range(classes):
        both, either = ((preds == c) & (targets == c)).sum(), ((preds == c) | (targets == c)).sum()
        if either:
            ious.append(both / either)
            dices.append(2 * both / (both + either))
    return np.mean(ious), np.mean(dices), (preds == targets).mean()


def value(metric, batches):
    for preds, targets in batches:
        metric.process(None, {"preds": preds, "targets": targets})
    (found,) = metric.evaluate(len(batches)).values()
    return found


def pixels(seed, classes=19, count=3, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        targets = torch.randint(0, classes, (2, 5, 7), generator=generator)
        wrong = torch.rand(targets.shape, generator=generator) < 0.4
        preds = torch.where(wrong, torch.randint(0, classes, targets.shape, generator=generator), targets)
        targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORE
        batches.append((preds, targets))
    return batches


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([3, 19]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([19, 20, 35]),
)
def test_values_match_a_plain_loop_for_any_num_classes(seed, classes, ignored, announced):
    batches = pixels(seed, classes, ignored=ignored)
    preds, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    iou, dice, accuracy = plain_means(preds, targets)
    assert value(IoU(announced, IGNORE), batches) == pytest.approx(iou)
    assert value(Dice(announced, IGNORE), batches) == pytest.approx(dice)
    assert value(PixelAccuracy(IGNORE), batches) == pytest.approx(accuracy)


def test_iou_matches_torchmetrics_if_each_class_occurs():
    torchmetrics = pytest.importorskip("torchmetrics")
    batches = pixels(0, 4, count=5)
    theirs = torchmetrics.classification.MulticlassJaccardIndex(4, ignore_index=IGNORE)
    for preds, targets in batches:
        theirs.update(preds, targets)
    assert value(IoU(4, IGNORE), batches) == pytest.approx(theirs.compute().item())


def test_accuracy_and_top5_are_fractions_of_the_samples():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(6, 10, generator=generator), torch.randint(0, 10, (6,), generator=generator))
        for _ in range(4)
    ]
    scores, targets = (torch.cat(part).numpy() for part in zip(*batches, strict=True))
    ranks = (scores > scores[np.arange(24), targets][:, None]).sum(1)
    assert Top1().default_prefix is None
    found = Evaluator([Top1(), Top5()])
    for preds, labels in batches:
        found.process({"preds": preds, "targets": labels})
    assert found.evaluate(24) == pytest.approx({"Accuracy": (ranks < 1).mean(), "Top5": (ranks < 5).mean()})


# ---- metrics by name -----------------------------------------------------------------------------------
