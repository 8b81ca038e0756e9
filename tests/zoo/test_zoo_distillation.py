"""Tests of the losses for knowledge distillation, against loops in float64."""

import math

import pytest
import torch
from torch import nn

from slipstream.registry import MODELS
from slipstream.training.losses import loss_config
from slipstream.zoo import (
    ChannelWiseKnowledgeDistillationLoss,
    KDklDivLoss,
    KDOutput,
    NormalizationAdapter,
)


def outputs(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def softmax(values):
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def divergence(student, teacher):
    """Return the Kullback-Leibler divergence between two lists of logits."""
    p, q = softmax(student), softmax(teacher)
    return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_kd_logits_loss_combines_both_losses(share):
    student, teacher = outputs(6, 4)
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    target = "super_gradients.training.losses.label_smoothing_cross_entropy_loss.CrossEntropyLoss"
    params = {"task_loss_fn": {"_target_": target}, "distillation_loss_coeff": share}
    found = MODELS.build(loss_config("KDLogitsLoss", params))(KDOutput(student, teacher), targets)
    rows = list(zip(student.tolist(), teacher.tolist(), targets.tolist(), strict=True))
    task = sum(-math.log(softmax(row)[label]) for row, _, label in rows) / 6
    wanted = sum(divergence(row, other) for row, other, _ in rows) / 6
    assert found["loss_task"].item() == pytest.approx((1 - share) * task, rel=1e-12)
    assert found["loss_distillation"].item() == pytest.approx(share * wanted, rel=1e-12)


def test_the_summed_pixel_divergence_is_divided_by_the_number_of_images():
    student, teacher = outputs(2, 3, 4, 5)
    pixels = [logits.movedim(1, -1).reshape(-1, 3).tolist() for logits in (student, teacher)]
    wanted = sum(divergence(*rows) for rows in zip(*pixels, strict=True)) / 2
    assert KDklDivLoss()(student, teacher).item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("mode", ["channel_wise", "spatial_wise"])
@pytest.mark.parametrize("ignored", [None, 2])
def test_channel_wise_distillation_normalizes_maps(mode, ignored):
    student, teacher = outputs(2, 3, 4, 5, seed=1)
    targets = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    loss = ChannelWiseKnowledgeDistillationLoss(mode, temperature=3.0, ignore_index=ignored)
    total = 0.0
    for image in range(2):
        maps = [(logits[image].reshape(3, 20) / 3.0).tolist() for logits in (student, teacher)]
        labels = targets[image].flatten().tolist()
        if mode == "spatial_wise":
            maps = [list(zip(*rows, strict=True)) for rows in maps]
        for index, (a, b) in enumerate(zip(*maps, strict=True)):
            for place, (p, q) in enumerate(zip(softmax(a), softmax(b), strict=True)):
                pixel = place if mode == "channel_wise" else index
                if labels[pixel] != ignored:
                    total += q * math.log(q / p)
    wanted = total * 9.0 / (2 * (3 if mode == "channel_wise" else 20))
    assert loss(student, teacher, targets).item() == pytest.approx(wanted, rel=1e-12)


def test_seg_kd_loss_weights_each_output():
    heads = [outputs(2, 3, 4, 5, seed=seed) for seed in range(3)]
    targets = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(2))
    config = {
        "_target_": "super_gradients.training.losses.seg_kd_loss.SegKDLoss",
        "weights": [1.0, 0.4],
        "kd_loss_weights": [2.0, 6.0],
        "kd_loss": {
            "_target_": "super_gradients.training.losses.cwd_loss.ChannelWiseKnowledgeDistillationLoss",
            "temperature": 3.0,
        },
        "ce_loss": {"_target_": "torch.nn.CrossEntropyLoss", "ignore_index": 1},
    }
    students, teachers = ([pair[index] for pair in heads] for index in (0, 1))
    found = MODELS.build(loss_config(config))(KDOutput(students, teachers), targets)
    wanted = {}
    for index, weight in enumerate((1.0, 0.4)):
        ce = nn.functional.cross_entropy(students[index], targets, ignore_index=1)
        kd = ChannelWiseKnowledgeDistillationLoss(temperature=3.0)(students[index], teachers[index])
        wanted |= {f"loss_ce{index}": weight * 2.0 * ce, f"loss_kd{index}": weight * 6.0 * kd}
    torch.testing.assert_close(found, wanted)


def test_the_adapter_converts_one_normalization_to_the_other():
    pixels = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    first, second = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ([0.5, 0.4, 0.3], [0.5, 0.6, 0.7])
    normalized = [
        (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        for mean, std in (first, second)
    ]
    found = NormalizationAdapter(*first, *second)(normalized[0].float())
    torch.testing.assert_close(found, normalized[1].float(), rtol=1e-5, atol=1e-5)
