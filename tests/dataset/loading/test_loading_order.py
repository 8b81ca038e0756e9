"""Tests of `batch_indices`, which recomputes the sample indices of a batch without loading the samples."""

import pytest
import torch
from torch.utils.data import TensorDataset

from slipstream.dataset.loading import samplers
from slipstream.dataset.loading.loader import build_dataloader, set_epoch
from slipstream.dataset.loading.order import EpochOrder, batch_indices


@pytest.mark.parametrize(
    "options",
    [
        dict(sampler=dict(type="DefaultSampler", shuffle=True)),
        dict(sampler=dict(type="InfiniteSampler", shuffle=True)),
        dict(sampler=dict(type="InfiniteSampler", shuffle=False), drop_last=True),
        dict(sampler=dict(type="RandomSampler")),
        dict(sampler=dict(type="RandomSampler", replacement=True, num_samples=33)),
        dict(num_batch_per_epoch=3),
    ],
)
@pytest.mark.parametrize(("epoch", "start"), [(0, 0), (2, 1)])
def test_batch_indices_match_the_batches_that_a_loader_yields(options, epoch, start):
    data = TensorDataset(torch.arange(40))
    made = build_dataloader(dict(dataset=data, batch_size=7, **options), 5, "train_dataloader", training=True)
    set_epoch(made, epoch, start)
    number = start
    for batch in made:
        assert batch_indices(made, epoch, number) == batch[0].tolist()
        number += 1
        if number == start + 9:
            break
    assert number > start + 1


def test_order_of_an_epoch_is_drawn_once_for_ascending_batches(monkeypatch):
    draws, order = [], samplers._order
    monkeypatch.setattr(samplers, "_order", lambda *args: draws.append(args) or order(*args))
    options = dict(dataset=TensorDataset(torch.arange(40)), batch_size=7, sampler=dict(type="DefaultSampler"))
    made = build_dataloader(options, 5, "train_dataloader", training=True)
    asked = [(0, 0), (0, 1), (0, 3), (0, 9), (1, 0), (1, 4), (0, 2)]
    expected = [batch_indices(made, *batch) for batch in asked]
    assert expected[3] is None  # after the end of the epoch
    draws.clear()
    kept = EpochOrder()
    assert [batch_indices(made, *batch, kept) for batch in asked] == expected
    assert len(draws) == 3


def test_batch_indices_are_unknown_for_custom_samplers():
    class Own(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(40))

        def __len__(self):
            return 40

    data = TensorDataset(torch.arange(40))
    made = build_dataloader(dict(dataset=data, sampler=Own()), 5, "train_dataloader", training=True)
    assert batch_indices(made, 0, 0) is None
