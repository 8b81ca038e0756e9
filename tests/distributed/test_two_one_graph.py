"""Tests of the step compiled as one graph in two processes, including compilation failures on one rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from two_processes import run_in_two

from slipstream.dist import get_rank, get_world_size, init_dist
from slipstream.train_step import accelerate

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

STEPS, BATCH = 20, 8
EAGER = dict(backend="eager")
OPTIONS = dict(sync_bn=True, accumulate=2, clip_grad=dict(max_norm=0.3), ema=dict(decay=0.9, type="constant"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(96, 4)
        )

    def forward(self, x):
        return self.body(x)


def batches(count=STEPS, size=BATCH):
    """Return this rank's batches. In two processes, each rank gets every second sample."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (count, size), generator=generator)
    mine = slice(get_rank(), None, get_world_size())
    return [(x[i, mine], y[i, mine]) for i in range(count)]


def averaged(losses):
    mean = torch.stack(losses)
    if get_world_size() > 1:
        torch.distributed.all_reduce(mean)
    return mean / get_world_size()


def train(compile=EAGER, data=None, model=None, **options):
    """Train in float64. Return the losses of the whole batches, the weights, the averages and the kind of step."""
    model = (model or Net()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = accelerate(model, optimizer, F.cross_entropy, dict(options, compile=compile))
    losses = averaged([step(batch)["loss"] for batch in data or batches()])
    kinds = {type(m).__name__ for m in model.modules()}
    average = None if step.average is None else dict(step.average.module.state_dict())
    fell_back = not getattr(step.inner, "uses_graph", True)
    return losses, dict(model.state_dict()), average, (type(step.inner).__name__, fell_back, kinds)


def whole(folder):
    return train(**OPTIONS)


def plain(folder):
    return train()


def eager(folder):
    return train(None)


class FailsOnRank1:
    """A backend that fails on rank 1 after `count` graphs."""

    def __init__(self, count):
        self.left = count

    def __call__(self, graph, inputs):
        if get_rank() == 1:
            if self.left == 0:
                raise NotImplementedError("no compiler on this machine")
            self.left -= 1
        return graph.forward


def one_cannot_capture(folder):
    return train(dict(backend=FailsOnRank1(0)))


def one_computes_wrongly(folder):
    """Train with a compiled step that drops a gradient on rank 1 within an accumulation window."""

    def lost(graph, inputs):
        def run(*args):
            outputs = graph.forward(*args)
            for value in args if get_rank() == 1 else ():
                if value.shape == (4, 96) and not value.requires_grad:
                    value.zero_()
            return outputs

        return run

    return [train(how, accumulate=2) for how in (dict(backend=lost), None)]


def start(folder):
    init_dist("pytorch", "gloo")


ALL = [start, whole, plain, eager, one_cannot_capture, one_computes_wrongly]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two(ALL, tmp_path_factory.mktemp("one_graph"), timeout=120)


def both(answers, name):
    for answer in answers[name]:
        assert not isinstance(answer, str), answer
    return answers[name]


def assert_same(one, other, rtol=1e-9, atol=1e-10):
    for mine, theirs in zip(one[:3], other[:3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def test_one_graph_matches_one_process_with_every_option(answers):
    alone = train(**OPTIONS)
    assert len(alone[0].unique()) == STEPS
    for answer in both(answers, "whole"):
        assert answer[3][:2] == ("GraphStep", False)
        assert "SyncBatchNorm" in answer[3][2]
        assert_same(answer, alone)


@pytest.mark.parametrize("name", ["plain"])
def test_one_graph_matches_ddp_for_every_bucket_size(answers, name):
    for found, expected in zip(both(answers, name), both(answers, "eager"), strict=True):
        assert found[3][:2] == ("GraphStep", False)
        assert_same(found, expected)


def test_both_ranks_train_eagerly_if_one_rank_cannot_capture(answers):
    for found, expected in zip(both(answers, "one_cannot_capture"), both(answers, "eager"), strict=True):
        assert found[3][:2] == ("GraphStep", True)
        assert_same(found, expected, rtol=0, atol=0)


def test_failed_verification_on_one_rank_disables_the_graph_on_both(answers):
    for found, expected in both(answers, "one_computes_wrongly"):
        assert found[3][:2] == ("GraphStep", True)
        assert_same(found, expected, rtol=0, atol=0)
