"""Test that both ranks skip a step if the loss or a gradient of one rank is not finite, with DDP and FSDP2."""

import math

import pytest
import torch
from torch import nn
from two_processes import run_in_two

from slipstream.dist import init_dist
from slipstream.model import MMDistributedDataParallel
from slipstream.model.wrappers import MMFullyShardedDataParallel
from slipstream.optim import OptimWrapper
from slipstream.sharding import full_tensor
from slipstream.speed.nan_guard import SkipNonFinite
from slipstream.step import EagerStep, sum_losses

PLAIN, NAN_ON_1, INF_LOSS_ON_0 = "plain", "nan in the data on rank 1", "infinite loss on rank 0"
NO_GRADIENT_ON_1 = "nan loss on rank 1 with a gradient of zero"
BATCHES = [NAN_ON_1, PLAIN, INF_LOSS_ON_0, NAN_ON_1, PLAIN, NO_GRADIENT_ON_1, PLAIN]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)
        )  # a single row, so rank 1 has an empty shard

    def forward(self, x, extra):
        loss = self.body(x).square().mean()
        return {"loss": torch.where(torch.tensor(math.isnan(extra)), extra, loss + extra)}


def train(wrap, batches, guard=True):
    """Return the weights and, with a guard, the number of skipped steps."""
    rank = torch.distributed.get_rank()
    core = Net()
    net = wrap(core)
    optim = OptimWrapper(torch.optim.AdamW(core.parameters(), lr=0.05))
    skip = SkipNonFinite(core, torch.device("cpu"))
    optim.parts += [skip] if guard else []
    optim.initialize_count_status(net, 0, -1)
    step = EagerStep(lambda batch: sum_losses(net(*batch)), net, optim)
    done = 0
    for kind in batches:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * done + rank))
        done += kind == PLAIN
        if kind == NAN_ON_1 and rank == 1:
            x[0, 0] = math.nan
        extra = math.nan if kind == NO_GRADIENT_ON_1 and rank == 1 else 0.0
        step((x, math.inf if kind == INF_LOSS_ON_0 and rank == 0 else extra))
    weights = {name: full_tensor(p).tolist() for name, p in core.named_parameters()}
    return weights, skip.read() if guard else None


def both(wrap):
    init_once()
    return train(wrap, BATCHES), train(wrap, [PLAIN] * 3, guard=False)


def init_once():
    if not torch.distributed.is_initialized():
        init_dist("pytorch", backend="gloo")


def ddp(folder):
    return both(MMDistributedDataParallel)


def fsdp2(folder):
    return both(MMFullyShardedDataParallel)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([ddp, fsdp2], tmp_path_factory.mktemp("guard"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_both_ranks_skip_a_step_with_nan_on_one_rank(answers, kind):
    for answer in answers[kind]:
        assert not isinstance(answer, str), answer
        (weights, skipped), (expected, _) = answer
        assert skipped == 4
        assert weights == expected
    assert answers[kind][0] == answers[kind][1]
