"""Test that the EMA, the losses and the crops match SuperGradients' documented formulas."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Trainer
from slipstream.dataset import SegCropImageAndMask
from slipstream.errors import ConfigError
from slipstream.registry import MODELS
from slipstream.training import Callback
from slipstream.training.losses import loss_config


class Weights(Callback):
    """Record the weight after each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_gradient_step_end(self, context):
        self.steps.append(context.net.weight.detach().double().clone())


def ema_of_a_run(tmp_path, params, batches=9, window=2):
    """Train a linear layer; return the EMA weight from the checkpoint and the weights after each optimizer step."""
    torch.manual_seed(0)
    net, weights = nn.Linear(3, 2), Weights()
    inputs, labels = torch.randn(batches * 4, 3), torch.randint(2, (batches * 4,))
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)
    Trainer("run", str(tmp_path)).train(
        net,
        dict(
            max_epochs=2, initial_lr=0.5, loss="CrossEntropyLoss", ema=True, ema_params=params, silent_mode=True,
            batch_accumulate=window, phase_callbacks=[weights], average_best_models=False, metric_to_watch=None,
        ),
        loader,
    )  # fmt: skip
    state = torch.load(tmp_path / "run" / "ckpt_latest.pth", weights_only=True)["state_dict"]
    return state["network.weight"], weights.steps


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(
    ("params", "decay"),
    [
        (dict(decay=0.99, decay_type="threshold"), lambda s, total: min(0.99, (1 + s) / (10 + s))),
        (dict(decay=0.9, decay_type="exp", beta=4), lambda s, total: 0.9 * (1 - math.exp(-4 * s / total))),
    ],
)
def test_the_decay_of_the_ema_counts_batches_not_updates(tmp_path, params, decay, window):
    found, steps = ema_of_a_run(tmp_path, params, window=window)
    assert len(steps) == 18 // window
    wanted = steps[0]  # the first update copies the weights, unlike in SuperGradients (documented)
    for update, weight in enumerate(steps[1:], start=2):
        factor = decay(update * window, 18)
        wanted = factor * wanted + (1 - factor) * weight
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def smoothed(logits, ids, weight, eps, ignored):
    """Return the smoothed cross-entropy for class ids, computed in a loop over the samples."""
    total, count = 0.0, 0
    for row, label in zip(logits.double().tolist(), ids.tolist(), strict=True):
        if label == ignored:
            continue
        norm = math.log(sum(math.exp(value) for value in row))
        scores = [factor * (value - norm) for value, factor in zip(row, weight, strict=True)]
        total -= (1 - eps) * scores[label] + eps * sum(scores) / len(scores)
        count += 1
    return total / count


@pytest.mark.parametrize("weight", [None, [0.2, 3.0, 1.5, 0.7]])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_smoothed_cross_entropy_divides_by_the_number_of_samples(weight, ignored):
    torch.manual_seed(0)
    logits, ids = torch.randn(12, 4), torch.randint(4, (12,))
    arguments = dict(smooth_eps=0.3, ignore_index=ignored, weight=weight)
    loss = MODELS.build(loss_config({"CrossEntropyLoss": arguments}))
    wanted = smoothed(logits, ids, weight or [1.0] * 4, 0.3, ignored)
    assert loss(logits, ids).item() == pytest.approx(wanted, rel=1e-6)
    # For pixels, the loss is also smoothed over the classes (SuperGradients smooths over the width).
    pixels = logits.T.reshape(1, 4, 3, 4)
    assert loss(pixels, ids.reshape(1, 3, 4)).item() == pytest.approx(wanted, rel=1e-6)


def test_gradients_of_smoothed_cross_entropy_ignore_ignored_samples():
    logits = torch.randn(4, 3, requires_grad=True)
    loss = MODELS.build(
        loss_config("CrossEntropyLoss", dict(smooth_eps=0.1, weight=[1.0, 2.0, 3.0], ignore_index=255))
    )
    loss(logits, torch.tensor([0, 255, 2, 255])).backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(1) > 0).tolist() == [True, False, True, False]
    loss(logits, torch.full((4,), 255)).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(("side", "first"), [(4, 0), (5, 0), (6, 1), (7, 2), (8, 2), (9, 2), (11, 4)])
def test_center_crop_rounds_half_margins_to_even_numbers(side, first):
    image = np.arange(side * side, dtype=np.uint8).reshape(side, side)
    sample = {"image": np.stack([image] * 3, axis=-1), "mask": image}
    cropped = SegCropImageAndMask(4, "center")(sample, np.random.default_rng(0))
    assert cropped["mask"][0, 0] == first * side + first == cropped["image"][0, 0, 0]


def test_an_ignored_id_among_the_classes_is_rejected_by_the_dice_loss():
    heads = dict(num_aux_heads=0, num_detail_heads=0, weights=[1.0])
    with pytest.raises(ConfigError, match="is one of the 3 classes") as error:
        loss_config({"DiceCEEdgeLoss": dict(num_classes=3, ignore_index=0, **heads)})
    assert error.value.path == "training_params.loss.ignore_index"
    for allowed in (3, 255, -100):
        loss_config({"DiceCEEdgeLoss": dict(num_classes=3, ignore_index=allowed, **heads)})
