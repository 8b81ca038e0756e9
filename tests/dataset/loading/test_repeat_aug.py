"""Test that `RepeatAugSampler` yields the same indices as the sampler of SuperGradients."""

import math

import numpy as np
import pytest
import torch

from slipstream.dataset.loading import samplers
from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.samplers import RepeatAugSampler


def wanted(size, world, rank, repeats, rounded, order):
    """List all repetitions, pad the list to a multiple of the number of ranks, and return this rank's part."""
    if float(repeats).is_integer():
        several = np.repeat(order, int(repeats)).tolist()
    else:
        several = [order[int(i // repeats)] for i in range(math.ceil(repeats * size))]
    total = math.ceil(size * repeats / world) * world
    several += several[: total - len(several)]
    kept = size // rounded * rounded // world if rounded else math.ceil(size / world)
    return several[rank:total:world][:kept]


@pytest.mark.parametrize(("size", "world"), [(12, 1), (13, 2), (7, 3), (600, 4)])
@pytest.mark.parametrize("repeats", [1, 3, 2.5])
@pytest.mark.parametrize("rounded", [0, 5])
def test_ranks_take_turns_at_reading_the_repetitions(monkeypatch, size, world, repeats, rounded):
    for rank in range(world):
        monkeypatch.setattr(samplers, "get_dist_info", lambda rank=rank: (rank, world))
        sampler = RepeatAugSampler(range(size), shuffle=False, num_repeats=repeats, selected_round=rounded)
        assert list(sampler) == wanted(size, world, rank, repeats, rounded, list(range(size)))
        assert len(list(sampler)) == len(sampler)


class Drawn:
    """A dataset whose samples consist of their index and a random number."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return int(index), sample_rng(index).random()


@pytest.mark.parametrize("workers", [0, 1])
def test_repetitions_of_a_sample_get_different_random_numbers(workers):
    config = {"type": "RepeatAugSampler", "num_repeats": 3, "selected_round": 0}
    loader = build_dataloader(
        {"dataset": Drawn(), "sampler": config, "batch_size": 3, "num_workers": workers},
        0,
        "loader",
        training=True,
    )
    first, again = (list(loader) for _ in range(2))
    for (indices, numbers), (_, same) in zip(first, again, strict=True):
        assert len(set(indices.tolist())) == 1
        assert len(set(numbers.tolist())) == 3
        torch.testing.assert_close(numbers, same)
