"""Tests of `BatchSizes` and `count_samples`, which determine the number of samples in a batch."""

import pytest
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slipstream.dataset.loading.loader import BatchSizes, build_dataloader, set_epoch
from tiny_runs import loader, samples


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(*samples(19)))


class Growing:
    """A batch sampler whose batches have 1, 2, 3 and 1 samples."""

    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], [6]])

    def __len__(self):
        return 4


def build(cfg):
    return build_dataloader(cfg, 0, "train_dataloader", training=True)


@pytest.mark.parametrize(
    "cfg",
    [
        loader(TensorDataset(*samples(19))),
        loader(TensorDataset(*samples(16))),
        loader(TensorDataset(*samples(19)), drop_last=True),
        loader(TensorDataset(*samples(19)), num_batch_per_epoch=2),
        dict(dataset=Stream(), batch_size=8),
        DataLoader(TensorDataset(*samples(19)), batch_sampler=Growing()),
        DataLoader([samples(4), samples(2)], batch_size=None),
    ],
    ids=["last is smaller", "all are full", "drop_last", "limit", "stream", "batch sampler", "ready batches"],
)
def test_sizes_match_the_batches(cfg):
    made = build(cfg)
    sizes = BatchSizes(made)
    found = [(sizes.get(number, batch), batch[0]) for number, batch in enumerate(made)]
    assert found
    for size, inputs in found:
        assert size == len(inputs)


def test_samples_that_a_resumed_run_skips_are_not_counted():
    made = build(loader(TensorDataset(*samples(19)), shuffle=False))
    sizes = BatchSizes(made)
    set_epoch(made, 0, 1, 3)
    assert [(sizes.get(1 + index, batch), len(batch[0])) for index, batch in enumerate(made)] == [
        (5, 5),
        (3, 3),
    ]
