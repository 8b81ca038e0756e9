"""The batch-size finder in two processes: the ranks try the same sizes together and return the same result."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from two_processes import run_in_two

import tiny_runs
from slipstream.dist import all_reduce, get_rank, init_dist
from slipstream.tune import find_batch_size
from slipstream.tune.process import descendants

pytestmark = pytest.mark.slow


class FullOnOne(nn.Module):
    """A model whose backward pass runs out of memory on rank 1, after the gradients of the last layer are ready."""

    def __init__(self, limit):
        super().__init__()
        self.first, self.last, self.limit = nn.Linear(4, 8), nn.Linear(8, 3), limit

    def forward(self, inputs):
        hidden = self.first(inputs)
        if get_rank() == 1 and len(inputs) > self.limit and hidden.requires_grad:
            hidden.register_hook(run_out_of_memory)
        return self.last(hidden)


def run_out_of_memory(grad):
    raise torch.OutOfMemoryError("simulated")


def state(model, optimizer):
    grads = [param.grad for param in model.parameters()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), grads, torch.get_rng_state()])


def out_of_memory_on_one_rank(folder):
    init_dist("pytorch", timeout=30)
    torch.manual_seed(get_rank())
    model = FullOnOne(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*tiny_runs.samples()), batch_size=8, shuffle=True)
    before, rows, start = state(model, optimizer), [], time.monotonic()
    found = find_batch_size(
        model, loader, optimizer, cross_entropy, max_batch_size=4, budget=300, report=rows.append
    )
    seconds = time.monotonic() - start
    torch.testing.assert_close(before, state(model, optimizer), rtol=0, atol=0)
    total = torch.ones(1)
    all_reduce(total)  # the group of the calling processes still works
    trials = [pid for pid in descendants(os.getpid()) if b"spawn_main" in command(pid)]
    return found, rows == found.rows, seconds, total.item(), trials


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return run_in_two([out_of_memory_on_one_rank], tmp_path_factory.mktemp("real"), timeout=300)


def test_out_of_memory_in_a_backward_pass_of_one_rank_does_not_block_the_others(real):
    (first, *_), (second, *_) = real["out_of_memory_on_one_rank"]
    assert first == second
    assert first.largest == 2
    assert [(row.batch_size, row.status) for row in first.rows] == [
        (1, "fits"),
        (2, "fits"),
        (4, "out of memory"),
        (3, "out of memory"),
    ]
    assert first.rows[-1].reason == "OutOfMemoryError: simulated"
    assert all(row.samples_per_second > 0 and row.peak_mib > 1 for row in first.rows[:2])
    for _, reported, seconds, total, trials in real["out_of_memory_on_one_rank"]:
        assert (reported, total, trials) == (True, 2.0, [])
        assert seconds < 200  # the budget is 300 s
