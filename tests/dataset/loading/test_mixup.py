"""Tests of Mixup and CutMix. The mixing weight is read from a batch's targets and used to check its images."""

import numpy as np
import pytest
import torch

from slipstream.dataset.loading.collate import collate_mixup
from slipstream.registry import FUNCTIONS

CLASSES = 5


def samples(count=6, height=10, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
    return [(image, index % CLASSES) for index, image in enumerate(images)]


def mixed(seed=0, batch=None, **arguments):
    torch.manual_seed(seed)
    options = {"mixup_alpha": 1.0, "num_classes": CLASSES, "label_smoothing": 0.0} | arguments
    return collate_mixup(samples() if batch is None else batch, **options)


def factor_of(targets):
    """Return the mixing weight of a batch, read from sample 1. Sample 0 and its counterpart, sample 5, have class 0."""
    return float(targets[1, 1])  # sample 1 has class 1, and its counterpart, sample 4, has class 4


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_adds_each_image_to_its_counterpart(alpha):
    originals = torch.stack([image for image, _ in samples()]).double()
    factors = []
    for seed in range(40):
        images, targets = mixed(seed, mixup_alpha=alpha)
        factor = factor_of(targets)
        wanted = factor * originals + (1 - factor) * originals.flip(0)
        torch.testing.assert_close(images.double(), wanted, rtol=1e-5, atol=1e-3)
        assert images.dtype == torch.float32
        for index in range(6):
            labels = np.zeros(CLASSES)
            labels[index % CLASSES] += factor
            labels[(5 - index) % CLASSES] += 1 - factor
            np.testing.assert_allclose(targets[index], labels, atol=1e-6)
        factors.append(factor)
    # The standard deviation of Beta(a, a) is 1 / sqrt(8 a + 4).
    assert np.mean(factors) == pytest.approx(0.5, abs=0.2)
    assert np.std(factors) == pytest.approx((8 * alpha + 4) ** -0.5, rel=0.35)


@pytest.mark.parametrize("correct", [True, False])
def test_cutmix_replaces_a_rectangle(correct):
    originals = torch.stack([image for image, _ in samples()]).float()
    others = originals.flip(0)
    exact = []
    for seed in range(30):
        images, targets = mixed(seed, mixup_alpha=0.0, cutmix_alpha=1.0, correct_lam=correct)
        replaced = ((images == others) & (originals != others)).any(1).any(0)
        rows, columns = (replaced.any(dim).nonzero().flatten() for dim in (1, 0))
        box = torch.zeros_like(replaced)
        if len(rows):
            box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
        torch.testing.assert_close(images, torch.where(box, others, originals))
        exact.append(factor_of(targets) == pytest.approx(1 - box.float().mean().item(), abs=1e-6))
    assert all(exact) if correct else not all(exact)


def test_either_mixup_or_cutmix_is_drawn_for_each_batch():
    originals = torch.stack([image for image, _ in samples()]).float()
    cut = 0
    for seed in range(60):
        images, _ = mixed(seed, mixup_alpha=1.0, cutmix_alpha=1.0, switch_prob=0.25)
        cut += bool(((images == originals) | (images == originals.flip(0))).all())
    assert 5 <= cut <= 26


def test_labels_are_smoothed_before_they_are_mixed():
    images, targets = mixed(prob=0.0, label_smoothing=0.1)
    torch.testing.assert_close(images, torch.stack([image for image, _ in samples()]).float())
    wanted = torch.full((6, CLASSES), 0.02)
    wanted[torch.arange(6), torch.arange(6) % CLASSES] = 0.92
    torch.testing.assert_close(targets, wanted)
    _, half = mixed(3, label_smoothing=0.1)
    torch.testing.assert_close(half.sum(1), torch.ones(6))


def test_other_items_of_a_sample_are_kept():
    batch = [
        {"inputs": image, "targets": label, "device_params": torch.full((6,), 2.0)}
        for image, label in samples()
    ]
    found = mixed(4, batch)
    images, targets = mixed(4)
    torch.testing.assert_close(
        found, {"inputs": images, "targets": targets, "device_params": torch.full((6, 6), 2.0)}
    )
    assert FUNCTIONS.resolve("CollateMixup") is collate_mixup
