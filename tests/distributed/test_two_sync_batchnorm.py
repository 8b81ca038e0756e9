"""SyncBN in two gloo processes matches one process with the whole batch."""

import copy

import pytest
import torch
from torch import nn
from two_processes import run_in_two

from slipstream.dist import get_rank, init_dist
from slipstream.model import convert_sync_batchnorm

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

SHARDS = (slice(0, 5), slice(5, 8))  # batch sizes differ between ranks


class Shifted(nn.BatchNorm1d):
    """A subclass of BatchNorm with an own forward, as libraries define them."""

    def forward(self, x):
        return super().forward(x) + 0.5


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 6),
        Shifted(6),
    ).double()


def batches():
    g = torch.Generator().manual_seed(1)
    # For values far from zero, the variance E[x^2] - E[x]^2 is inexact due to cancellation.
    return 1000 + torch.randn(20, 8, 3, 8, 8, generator=g, dtype=torch.float64)


def train(model, data, mine, world):
    """Run twenty SGD steps on a weighted loss of all outputs. Return losses and state."""
    losses = []
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64)
    for batch in data:
        # The loss is a sum divided by the whole batch size, so the ranks' gradients add up to those of one process.
        loss = (model(batch[mine]) * weights).tanh().sum() / len(batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        if world > 1:
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
            torch.distributed.all_reduce(total := loss.detach().clone())
        else:
            total = loss.detach()
        losses.append(total.item())
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.05 * gradient
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def eager(folder):
    init_dist("pytorch")
    return train(convert_sync_batchnorm(network()), batches(), SHARDS[get_rank()], 2)


def fullgraph(folder):
    init_dist("pytorch")
    model = convert_sync_batchnorm(network())
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = batches()[0][SHARDS[get_rank()]]
    weight = model[0].weight
    expected = torch.autograd.grad(model(x).tanh().sum(), weight)[0]
    actual = torch.autograd.grad(compiled(x).tanh().sum(), compiled._orig_mod[0].weight)[0]
    return (expected - actual).abs().max().item(), expected.abs().max().item()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([eager, fullgraph], tmp_path_factory.mktemp("sync_bn"))


@pytest.mark.parametrize("way", ["eager"])
def test_two_processes_match_one_process_at_every_step(answers, way):
    losses, state = train(network(), batches(), slice(0, 8), 1)
    for answer in answers[way]:
        assert not isinstance(answer, str), answer
        torch.testing.assert_close(answer[0], losses, rtol=1e-9, atol=1e-12)
        assert answer[1].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(answer[1][name], value, rtol=1e-8, atol=1e-10)


def test_compiled_sync_bn_has_no_graph_breaks_and_matches_eager_gradients(answers):
    for answer in answers["fullgraph"]:
        assert not isinstance(answer, str), answer
        difference, size = answer
        assert difference < 1e-9 * size
