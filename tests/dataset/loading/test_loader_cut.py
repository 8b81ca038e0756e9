"""Tests of `num_batch_per_epoch` with an existing `DataLoader`."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slipstream.dataset.loading.loader import build_dataloader
from slipstream.errors import ConfigError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("ours", [False, True])
def test_num_batch_per_epoch_limits_a_copy_of_the_loader(ours):
    ready = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
    if ours:
        ready = build_dataloader(ready, 0, "train_dataloader", training=True)
    cut = build_dataloader(
        dict(dataloader=ready, num_batch_per_epoch=3), 0, "train_dataloader", training=True
    )
    assert len(cut) == 3
    assert [batch[0].tolist() for batch in cut] == [[0, 1], [2, 3], [4, 5]]
    assert len(ready) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_batch_per_epoch=0), r"train_dataloader\.num_batch_per_epoch: must be an int of at least 1"),
        (dict(batch_size=3), r"train_dataloader: 'batch_size' cannot be changed for an existing DataLoader"),
    ],
)
def test_invalid_options_for_an_existing_loader_raise_errors(options, message):
    ready = DataLoader(TensorDataset(torch.zeros(4)))
    with pytest.raises(ConfigError, match=message):
        build_dataloader(dict(dataloader=ready, **options), 0, "train_dataloader", training=True)


def test_num_batch_per_epoch_rejects_iterable_datasets():
    with pytest.raises(ConfigError, match=r"num_batch_per_epoch: requires a DataLoader with a batch sampler"):
        build_dataloader(
            dict(dataloader=DataLoader(Stream()), num_batch_per_epoch=2), 0, "train_dataloader", training=True
        )
