"""Optimizers with modes, such as schedule-free ones: weights are validated and saved in evaluation mode."""

import pytest
import torch
import torch.nn.functional as F
from test_runner_plain import arguments, data, net
from torch.utils.data import DataLoader

from slipstream import Runner
from slipstream.evaluator import BaseMetric
from tiny_runs import assert_same, loader, weights

BETA, LR = 0.9, 0.1


class ScheduleFree(torch.optim.Optimizer):
    """SGD of "The Road Less Scheduled" (arXiv:2405.15682); in training mode, the weights are y, otherwise x."""

    def __init__(self, params, lr=LR):
        super().__init__(params, dict(lr=lr, training=False, k=0))

    def _lerp(self, weight, training):
        for group in self.param_groups:
            for p in group["params"] if group["training"] != training else ():
                p.data.lerp_(self.state[p].setdefault("z", p.data.clone()), weight)
            group["training"] = training

    def train(self):
        self._lerp(1 - BETA, True)

    def eval(self):
        self._lerp(1 - 1 / BETA, False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["training"], "the optimizer is not in training mode"
            share = 1 / (group["k"] + 1)
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p]["z"]
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (BETA * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def by_hand(epochs):
    """Return the averages x after each epoch, from the formulas of the paper."""
    model, found, k = net(), [], 0
    z = [p.detach().clone() for p in model.parameters()]
    x = [p.clone() for p in z]
    for _ in range(epochs):
        for inputs, targets in DataLoader(data(), batch_size=8):
            for p, a, b in zip(model.parameters(), z, x, strict=True):
                p.data.copy_((1 - BETA) * a + BETA * b)
            gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
            k += 1
            for gradient, a, b in zip(gradients, z, x, strict=True):
                a -= LR * gradient
                b += (a - b) / k
        found.append([p.clone() for p in x])
    return found


class Validated(BaseMetric):
    """Stores the weights with which the model was validated."""

    def __init__(self, model, found):
        super().__init__()
        self.model, self.found = model, found

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        self.found.append([p.detach().clone() for p in self.model.parameters()])
        return {"acc": float(len(self.found))}


def train(folder, epochs=2, **changes):
    """Return the model, and the weights with which it was validated."""
    model, found = net(), []
    validation = dict(
        val_dataloader=loader(data(), shuffle=False), val_cfg={}, val_evaluator=Validated(model, found)
    )
    options = dict(
        optim_wrapper=ScheduleFree(model.parameters()), train_cfg=dict(by_epoch=True, max_epochs=epochs)
    )
    runner = Runner(**arguments(folder, model, **options, **validation, **changes))
    runner.train()
    runner.val()
    return runner, found


@pytest.mark.parametrize("speed", [{}, dict(compile=dict(backend="eager"))], ids=["eager", "compiled"])
def test_averages_are_validated_saved_and_returned(tmp_path, speed):
    runner, found = train(tmp_path, speed=speed)
    expected = by_hand(2)
    for weights_found, right in zip(found, [*expected, expected[-1]], strict=True):
        torch.testing.assert_close(weights_found, right, rtol=1e-9, atol=1e-11)
    for name in ("epoch_2.pth", "best_acc_epoch_2.pth"):
        saved = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        torch.testing.assert_close(dict(saved), weights(runner), rtol=1e-12, atol=1e-14)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = train(tmp_path / "whole", 3)[0]
    train(tmp_path / "parts", 2)
    assert_same(weights(train(tmp_path / "parts", 3, resume=True)[0]), weights(whole))
