"""Tests of `BatchSizes` and `count_samples`, which determine the number of samples in a batch."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from slipstream.dataset.loading.loader import BatchSizes, build_dataloader, count_samples, set_epoch
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


class Numbers(Sampler):
    """A sampler that yields `count + more * epoch` indices."""

    def __init__(self, count, more=0):
        self.count, self.more, self.epoch = count, more, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.count + self.more * self.epoch))


class Counted(Numbers):
    """A `Numbers` sampler whose reported length is `length`, or its true length if `length` is None."""

    def __init__(self, *args, length=None):
        super().__init__(*args)
        self.length = length

    def __len__(self):
        return self.length or self.count + self.more * self.epoch


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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Numbers(21), [[8, 8, 5], [8, 8, 5]]),
        (Counted(21, length=40), [[8, 8, 5], [8, 8, 5]]),
        (Counted(20, 3), [[8, 8, 4], [8, 8, 7]]),
    ],
    ids=["without a length", "fewer than its length", "different length in each epoch"],
)
def test_sizes_match_the_samples_that_a_sampler_draws(sampler, expected, workers):
    # With two views per sample, the first dimension of a batch is not its number of samples.
    made = build(
        DataLoader(TensorDataset(*samples(40)), 8, sampler=sampler, num_workers=workers, collate_fn=two_views)
    )
    sizes = BatchSizes(made)
    for epoch, numbers in enumerate(expected):
        set_epoch(made, epoch)
        assert [sizes.get(number, batch) for number, batch in enumerate(made)] == numbers


def two_views(samples):
    images = torch.stack([image for image, _ in samples])
    return torch.cat([images, images])


def test_samples_that_a_resumed_run_skips_are_not_counted():
    made = build(loader(TensorDataset(*samples(19)), shuffle=False))
    sizes = BatchSizes(made)
    set_epoch(made, 0, 1, 3)
    assert [(sizes.get(1 + index, batch), len(batch[0])) for index, batch in enumerate(made)] == [
        (5, 5),
        (3, 3),
    ]


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        (dict(name=["a", "b"], image=torch.zeros(2, 3)), 2),
        (dict(inputs=[torch.zeros(3, 5, 5)] * 6, data_samples=[{}] * 6), 6),
        (([torch.zeros(3, 5, 5)] * 6, [{}] * 6), 6),
        (dict(aux=torch.zeros(2, 3), inputs=torch.zeros(6, 3), targets=torch.zeros(6)), 6),
        (dict(aux=torch.zeros(2, 3), inputs=[torch.zeros(3, 5, 5)] * 6), 6),
        (dict(inputs=dict(image=torch.zeros(6, 3)), targets=torch.zeros(6)), 6),
        (torch.tensor(1.0), None),
        (object(), None),
        ({}, None),
    ],
)
def test_number_of_samples_is_inferred_from_the_structure_of_a_batch(batch, count):
    assert count_samples(batch) == count
