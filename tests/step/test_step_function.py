"""The eager step matches a plain loop, and invalid losses raise an error."""

import copy

import pytest
import torch
from torch import nn

from slipstream.errors import LossError
from slipstream.model import BaseModel
from slipstream.optim import OptimWrapper
from slipstream.step import EagerStep, sum_losses


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def forward(self, x, mode="tensor"):
        out = self.net(x)
        if mode == "loss":
            return {
                "loss_size": (out**2).mean(),
                "loss_sum": [out.sum() ** 2, out.abs().sum()],
                "mean": out.mean(),
            }
        return out


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(5, 3, generator=generator, dtype=torch.float64)] for _ in range(count)]


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def by_hand(net, data, max_norm):
    optimizer, logs = sgd(net), []
    for (x,) in data:
        out = net.net(x)
        size, square, absolute = (out**2).mean(), out.sum() ** 2, out.abs().sum()
        loss = size + square + absolute
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        logs.append(
            {
                "loss": loss,
                "loss_size": size,
                "loss_sum": square + absolute,
                "mean": out.mean(),
                "grad_norm": norm,
            }
        )
    return logs


def test_eager_step_matches_a_plain_training_loop():
    net, data = Net(), batches(5)
    hand = copy.deepcopy(net)
    optim = OptimWrapper(sgd(net), clip_grad={"max_norm": 0.5})
    step = EagerStep(lambda x: sum_losses(net.loss_step(x)), net, optim)
    logs = [step(batch) for batch in data]
    expected = by_hand(hand, data, 0.5)
    for key, value in hand.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(logs, expected, strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value.detach(), rtol=1e-12, atol=1e-12)


# ---- sum_losses --------------------------------------------------------------------------------------


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_only_entries_with_loss_in_their_name_are_summed_and_all_are_logged():
    a, b, acc = scalar(1.0), scalar(2.0), scalar(40.0)
    total, logs = sum_losses({"loss_a": a, "acc": acc, "aux_loss": b})
    assert total.item() == 3.0
    total.backward()
    assert (a.grad, b.grad, acc.grad) == (1.0, 1.0, None)
    assert list(logs.items()) == [("loss", 3.0), ("loss_a", 1.0), ("acc", 40.0), ("aux_loss", 2.0)]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (torch.ones(()), "must return a dict of scalar tensors such as {'loss': loss}, not Tensor"),
        (None, "must return a dict .* not NoneType"),
        ({}, r"no entry has 'loss' in its name, so there is nothing to minimize; got \[\]"),
        ({"acc": torch.ones(()), "CE": torch.ones(())}, r"no entry has 'loss' .* got \['CE', 'acc'\]"),
        (
            {"loss": torch.ones(2, 3)},
            r"'loss' has shape \(2, 3\), but a loss must be a scalar; use its mean",
        ),
        ({"loss": [torch.ones(()), torch.ones(2)]}, r"'loss\[1\]' has shape \(2,\)"),
        ({"loss": 1.5}, "'loss' must be a scalar tensor or a list of scalar tensors, not 1.5"),
        ({"loss": torch.ones(()), "acc": 0.5}, "'acc' must be a scalar tensor"),
        ({"loss": []}, r"'loss' must be a scalar tensor or a list of scalar tensors, not \[\]"),
        ({"loss": None}, "'loss' must be .* not None"),
    ],
)
def test_invalid_loss_error_names_the_loss(losses, message):
    with pytest.raises(LossError, match=message):
        sum_losses(losses)


def test_a_batch_that_requires_grad_receives_its_gradient():
    """An adversarial attack reads the gradient of some batches only."""
    net = Net()
    step = EagerStep(lambda x: sum_losses(net(x, "loss")), net, OptimWrapper(sgd(net)))
    for number, (x,) in enumerate(batches(4)):
        x.requires_grad_(number % 2 == 1)
        before = copy.deepcopy(net)
        step(x)
        assert (x.grad is not None) == (number % 2 == 1)
        if number % 2:
            plain = x.detach().requires_grad_()
            sum_losses(before(plain, "loss"))[0].backward()
            assert torch.equal(x.grad, plain.grad)
