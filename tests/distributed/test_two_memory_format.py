"""channels_last in two processes gives the same results as the contiguous memory format, with DDP and with FSDP2."""

import pytest
import torch
from torch import nn
from two_processes import run_in_two

from slipstream.dist import get_rank, init_dist
from slipstream.model import MMDistributedDataParallel
from slipstream.model.wrappers import MMFullyShardedDataParallel
from slipstream.speed.memory_format import to_channels_last

KINDS = {"ddp": MMDistributedDataParallel, "fsdp": MMFullyShardedDataParallel}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        )
        self.last = []

    def forward(self, x):
        y = self.convolutions(x)
        self.last.append(y.is_contiguous(memory_format=torch.channels_last))
        return y.square().mean()


def train(kind, lay_out, fused):
    net = Net()
    if lay_out:
        to_channels_last(net, weights=kind == "ddp")
    model = KINDS[kind](net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    generator = torch.Generator().manual_seed(get_rank())
    losses = []
    for _ in range(10):
        loss = model(torch.randn(2, 3, 8, 8, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    full = [p.full_tensor() if kind == "fsdp" else p for p in model.parameters()]
    return torch.stack(losses), [p.detach().clone() for p in full], all(net.last), any(net.last)


def ddp(folder):
    init_dist("pytorch")
    return train("ddp", False, False), train("ddp", True, True)


def fsdp(folder):
    return train("fsdp", False, False), train("fsdp", True, True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([ddp, fsdp], tmp_path_factory.mktemp("channels_last"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ten_steps_with_a_fused_optimizer_match_the_contiguous_format(answers, kind):
    for answer in answers[kind]:
        assert not isinstance(answer, str), answer
        (losses, weights, _, any_usual), (own_losses, own_weights, all_last, _) = answer
        assert all_last
        assert not any_usual
        torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_weights, weights, rtol=1e-4, atol=1e-5)
