import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from slipstream.dataset.loading.generators import SampleIndex, sample_rng
from slipstream.dataset.loading.loader import build_dataloader, is_infinite, length, set_epoch


class Draws(Dataset):
    """A dataset whose samples consist of the index and a random number from each global generator."""

    def __init__(self, size=10):
        self.metainfo = {"classes": ("a",)}
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return int(index), random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.rand(())


def mixup(samples):
    data = default_collate(samples)
    return [*data, np.random.beta(1, 1), torch.rand(1).item()]


def build(cfg, seed=1, training=True):
    return build_dataloader(cfg, seed, "train_dataloader", training)


def content(loader, epoch=None, start=0):
    if epoch is not None:
        set_epoch(loader, epoch, start)
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in loader]


def indices(loader, epoch=None, start=0):
    return [batch[0] for batch in content(loader, epoch, start)]


@pytest.fixture(autouse=True)
def _preserve_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1][1])
    assert np.random.get_state()[2] == states[1][2]
    assert torch.equal(torch.get_rng_state(), states[2])


# ---- order and augmentation ------------------------------------------------------------------------


@pytest.mark.parametrize("collate", [default_collate, mixup])
def test_batches_do_not_depend_on_the_number_of_workers(collate):
    cfg = dict(dataset=Draws(), batch_size=3, sampler=dict(type="DefaultSampler"), collate_fn=collate)
    without_workers = build(cfg)
    with_workers = build(dict(cfg, num_workers=2, persistent_workers=True))
    seen = []
    for epoch in (1, 0):
        wanted = content(without_workers, epoch)
        assert content(with_workers, epoch) == wanted, "the batches depend on the number of workers"
        seen.append(wanted)
    assert sorted(i for batch in seen[0] for i in batch[0]) == list(range(10))
    values = [x for epoch in seen for batch in epoch for x in batch[1]]
    assert len(set(values)) == 20, "two samples or epochs have equal random numbers"
    assert content(with_workers, 1, start=2) == seen[0][2:]
    assert content(without_workers, 1, start=2) == seen[0][2:]


class Keyed(Draws):
    """A dataset whose keys are (index, size) pairs, as in multi-scale training."""

    def __getitem__(self, key):
        return super().__getitem__(key[0])


def test_batch_has_the_same_random_numbers_at_any_position():
    batches = [[0, 2], [1, 3], [4]]
    forward, backward = (
        content(build(DataLoader(Draws(5), batch_sampler=order)), 3) for order in (batches, batches[::-1])
    )
    assert forward == backward[::-1]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_keys_that_are_not_integers_are_seeded(workers):
    batches = [[(0, "small"), (1, "small")], [(0, "large"), (1, "large")]]
    options = dict(num_workers=workers, persistent_workers=workers > 0)
    loader = build(DataLoader(Keyed(), batch_sampler=batches, **options))
    epochs = [content(loader, epoch) for epoch in (0, 1)]
    assert epochs == [content(build(DataLoader(Keyed(), batch_sampler=batches)), epoch) for epoch in (0, 1)]
    assert len({x for epoch in epochs for batch in epoch for x in batch[1]}) == 8


def test_generator_of_a_sample_depends_on_seed_epoch_and_index():
    keys = list(itertools.product((5, 0, 1), (1, 2, 2**40), (0, 1, 2)))
    draws = [sample_rng(SampleIndex(*key)).random() for key in keys]
    assert draws == [sample_rng(SampleIndex(*key)).random() for key in keys]
    assert len(set(draws)) == len(keys)
    first, second = (rng.random() for rng in sample_rng(SampleIndex(1, 2, 3)).spawn(2))
    assert first != second
    assert sample_rng(1).random() == sample_rng(SampleIndex(1, 0, 0)).random()


def test_subclass_of_tensor_dataset_is_seeded():
    loader = build(dict(dataset=Augmented(torch.zeros(6)), batch_size=6))
    values = next(iter(loader)).tolist()
    assert len(set(values)) == 6
    assert next(iter(loader)).tolist() == values


def test_tensor_batches_equal_those_of_default_collate():
    data = TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7), torch.ones(7, 1, 3).bfloat16())
    loader = build(dict(dataset=data, batch_size=3, sampler=dict(type="DefaultSampler", shuffle=True)))
    set_epoch(loader, 4)
    order = iter(list(loader.batch_sampler))
    set_epoch(loader, 4)
    for batch in loader:
        wanted = default_collate([data[i] for i in next(order)])
        assert type(batch) is type(wanted)
        for got, want in zip(batch, wanted, strict=True):
            assert torch.equal(got, want)
            assert got.dtype == want.dtype
    assert loader.dataset[0][1] == 0
    assert len(loader.dataset.tensors) == 3


# ---- configuration ---------------------------------------------------------------------------------


def test_only_training_loaders_are_padded_per_rank(monkeypatch):
    monkeypatch.setattr("slipstream.dataset.loading.samplers.get_dist_info", lambda: (1, 2))
    for kind in ("DefaultSampler", "slipstream.DefaultSampler", "mmengine.DefaultSampler"):
        cfg = dict(dataset=Draws(5), batch_size=8, sampler=dict(type=kind, shuffle=False))
        assert indices(build(cfg, training=True)) == [[1, 3, 0]]
        assert indices(build(cfg, training=False)) == [[1, 3]]
        cfg["sampler"]["round_up"] = True
        assert indices(build(cfg, training=False)) == [[1, 3, 0]]


def test_order_without_a_sampler_follows_shuffle():
    assert indices(build(dict(dataset=Draws(5), batch_size=2))) == [[0, 1], [2, 3], [4]]
    assert indices(build(dict(dataset=Draws(5), batch_size=2, drop_last=True))) == [[0, 1], [2, 3]]
    (order,) = indices(build(dict(dataset=Draws(30), batch_size=30, shuffle=True)))
    assert order != sorted(order)


def test_torch_samplers_are_built_by_name_and_seeded():
    cfg = dict(dataset=Draws(), batch_size=10, sampler=dict(type="RandomSampler"))
    orders = [indices(build(cfg), epoch) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_endless_loader_is_infinite_and_can_start_at_any_batch():
    loader = build(dict(dataset=Draws(4), batch_size=3, sampler=dict(type="InfiniteSampler")))
    assert is_infinite(loader)
    assert not is_infinite(build(dict(dataset=Draws(4), batch_size=3)))
    set_epoch(loader, 0)
    stream = list(itertools.islice(loader, 6))
    set_epoch(loader, 0, 4)
    rest = list(itertools.islice(loader, 2))
    assert [[p.tolist() for p in b] for b in rest] == [[p.tolist() for p in b] for b in stream[4:]]
    assert sorted(torch.cat([b[0] for b in stream])[:4].tolist()) == [0, 1, 2, 3]


def test_collate_fn_can_be_a_name_a_dict_or_a_function():
    for collate in (
        "pseudo_collate",
        dict(type="pseudo_collate"),
        lambda samples: list(zip(*samples, strict=True)),
    ):
        batch = next(iter(build(dict(dataset=Draws(2), batch_size=2, collate_fn=collate))))
        assert list(batch[0]) == [0, 1]
        assert not isinstance(batch[0], torch.Tensor)


# ---- existing DataLoaders ---------------------------------------------------------------------------------


def weighted(generator=None):
    return WeightedRandomSampler([0.0, 1.0, 0.0, 3.0, 1.0], 12, generator=generator)


class Halves:
    """A batch sampler that shuffles with Python's global generator, as custom samplers often do."""

    def __iter__(self):
        batches = [[0, 1], [2, 3], [4]]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return 3


READY = {
    "shuffle": lambda: DataLoader(Draws(5), batch_size=2, shuffle=True),
    "drop_last": lambda: DataLoader(Draws(5), batch_size=2, shuffle=True, drop_last=True),
    "sampler": lambda: DataLoader(Draws(5), batch_size=2, sampler=RandomSampler(Draws(5), True, 8)),
    "generator": lambda: DataLoader(
        Draws(5), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "weighted": lambda: DataLoader(Draws(5), batch_size=2, sampler=weighted()),
    "weighted_generator": lambda: DataLoader(
        Draws(5), batch_size=2, sampler=weighted(torch.Generator().manual_seed(3))
    ),
    "batch_sampler": lambda: DataLoader(Draws(5), batch_sampler=Halves()),
    "torchs_batch_sampler": lambda: DataLoader(Draws(5), batch_sampler=BatchSampler(range(5), 2, True)),
    "plain": lambda: DataLoader(Draws(5), batch_size=2),
}


@pytest.mark.parametrize("name", READY)
def test_existing_data_loader_becomes_reproducible(name):
    one, other = build(READY[name]()), build(READY[name]())
    whole = content(one, 2)
    before = random.getstate()
    random.seed(0)
    torch_state = torch.get_rng_state()
    torch.manual_seed(5)
    assert content(other, 2) == whole, "the global random state changed the batches"
    assert content(other, 2, start=1) == whole[1:]
    random.setstate(before)
    torch.set_rng_state(torch_state)
    assert content(one, 2) == whole, "an earlier pass changed the batches"

    sizes = [len(batch[0]) for batch in whole]
    drawn = sorted(i for batch in whole for i in batch[0])
    assert len(one) == len(whole) == len(READY[name]())
    if name in ("shuffle", "generator", "batch_sampler"):
        assert drawn == [0, 1, 2, 3, 4]
    if name in ("plain", "torchs_batch_sampler"):
        assert drawn == list(range(sum(sizes)))
    if name.startswith("weighted"):
        assert len(drawn) == 12
        assert set(drawn) <= {1, 3, 4}
    if name in ("drop_last", "torchs_batch_sampler"):
        assert sizes == [2, 2]
    if name not in ("plain", "torchs_batch_sampler"):
        orders = {str(indices(one, epoch)) for epoch in range(8)}
        assert len(orders) > 1, "all epochs have the same order"


class EverySecond(DataLoader):
    def __iter__(self):
        return itertools.islice(super().__iter__(), 0, None, 2)

    def __len__(self):
        return (super().__len__() + 1) // 2


def test_length_of_a_loader_class_is_the_number_of_batches_that_it_yields():
    own = EverySecond(TensorDataset(torch.arange(10.0)), batch_size=2)
    loader = build_dataloader(own, 0, "train_dataloader", training=True)
    assert length(loader) == len(list(loader)) == 3


class Endless(DataLoader):
    def __iter__(self):
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize("workers", [0, 1])
def test_each_pass_of_an_endless_loader_class_has_another_order(workers):
    own = Endless(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True, num_workers=workers)
    loader = build_dataloader(own, 0, "train_dataloader", training=True)
    set_epoch(loader, 0)
    passes = [list(itertools.islice(batches, 4)) for batches in [iter(loader)] for _ in range(3)]
    orders = [[int(x) for (batch,) in each for x in batch] for each in passes]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
