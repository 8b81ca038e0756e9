"""Tests of metrics for binary masks, of lists of ignored class ids, and of networks with one output channel."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.model import Segmentor
from slipstream.registry import METRICS
from slipstream.training import Trainer
from slipstream.training.metrics import BinaryDice, BinaryIOU, Dice, IoU, PixelAccuracy, metric_config


def evaluated(metric, *batches):
    for batch in batches:
        metric.process(None, batch)
    return metric.evaluate(len(batches))


def mask_scores(seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            2 * torch.randn(2, 5, 7, generator=generator),
            torch.randint(0, 2, (2, 5, 7), generator=generator, dtype=torch.uint8),
        )
        for _ in range(count)
    ]


def plain(batches, threshold, ratio):
    """Compute the IoU or Dice ratios of the mask and the background, and their mean, in a loop over the pixels."""
    pairs = [
        (int(1 / (1 + math.exp(-score)) >= threshold), label)
        for scores, labels in batches
        for score, label in zip(scores.double().flatten().tolist(), labels.flatten().tolist(), strict=True)
    ]
    found = []
    for part in (1, 0):
        both = sum(p == part and t == part for p, t in pairs)
        either = sum(p == part or t == part for p, t in pairs)
        found.append(both / either if ratio == "IOU" else 2 * both / (both + either))
    return dict(
        zip(
            (f"{name}_{ratio}" for name in ("target", "background", "mean")),
            [*found, sum(found) / 2],
            strict=True,
        )
    )


@pytest.mark.parametrize("threshold", [0.5, 0.3, 0.8])
@pytest.mark.parametrize(("kind", "ratio"), [(BinaryIOU, "IOU"), (BinaryDice, "Dice")])
def test_binary_metrics_match_a_loop_over_pixels(threshold, kind, ratio):
    batches = mask_scores(0)
    samples = [{"preds": scores.unsqueeze(1), "targets": labels} for scores, labels in batches]
    found = evaluated(kind(threshold=threshold), *samples)
    assert found == pytest.approx(plain(batches, threshold, ratio))
    ids = [{"preds": (p >= 0).long(), "targets": t, "scores": p} for p, t in batches]
    assert evaluated(kind(threshold=threshold), *ids) == pytest.approx(found)
    (built,) = metric_config([{kind.__name__: {"threshold": threshold, "dist_sync_on_step": True}}])
    assert evaluated(METRICS.build(built), *samples) == pytest.approx(found)


@pytest.mark.parametrize(("kind", "twice"), [(IoU, False), (Dice, True)])
@pytest.mark.parametrize("ignored", [[0, 2], (2, 0, 9), [3]])
def test_several_ignored_ids_are_excluded(kind, twice, ignored):
    generator = torch.Generator().manual_seed(2)
    preds, targets = (torch.randint(0, 5, (2, 8, 8), generator=generator) for _ in range(2))
    keep = ~np.isin(targets.numpy(), ignored)
    p, t = preds.numpy()[keep], targets.numpy()[keep]
    ratios = []
    for c in set(range(5)) - set(ignored):
        both, area = ((p == c) & (t == c)).sum(), (p == c).sum() + (t == c).sum()
        ratios.append(2 * both / area if twice else both / (area - both))
    sample = {"preds": preds, "targets": targets.to(torch.uint8)}
    assert evaluated(kind(5, ignore_index=ignored), sample) == pytest.approx({kind.__name__: np.mean(ratios)})
    accuracy = evaluated(PixelAccuracy(ignore_label=ignored), sample)
    assert accuracy == pytest.approx({"PixelAccuracy": (p == t).mean()})


def test_a_network_with_one_channel_predicts_a_mask():
    net = nn.Conv2d(3, 1, 1)
    images = torch.randn(2, 3, 4, 4)
    found = Segmentor(net)(images, torch.zeros(2, 4, 4, dtype=torch.uint8), mode="predict")
    torch.testing.assert_close(found["scores"], net(images).squeeze(1))
    assert found["preds"].equal((found["scores"] >= 0).long())


class Mask(nn.Module):
    """A 1x1 convolution with one output channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, images):
        return self.conv(images)


def test_binary_segmentation_can_monitor_one_value_of_its_metric(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(16, 3, 6, 6)
    masks = (images.mean(1) > 0.3).long()
    loader = DataLoader(TensorDataset(images, masks), batch_size=4)
    net = Mask()
    history = Trainer("run", str(tmp_path)).train(
        net,
        dict(
            max_epochs=6, initial_lr=1.0, loss="BCEDiceLoss", train_metrics_list=[BinaryIOU()], silent_mode=True,
            valid_metrics_list=["BinaryIOU", BinaryDice(threshold=0.4)], metric_to_watch="target_iou",
            average_best_models=False,
        ),
        loader,
        loader,
    )  # fmt: skip
    assert history[-1]["target_IOU"] > 0.8
    with torch.no_grad():
        pairs = [(net(images).squeeze(1), masks)]
    assert history[-1] == pytest.approx({"epoch": 6, **plain(pairs, 0.5, "IOU"), **plain(pairs, 0.4, "Dice")})
    assert (tmp_path / "run/ckpt_best.pth").is_file()
