import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from slipstream.checkpoint import load_checkpoint, save_checkpoint
from slipstream.dataset.loading import samplers
from slipstream.dataset.loading.samplers import DefaultSampler, EpochBatchSampler, InfiniteSampler


@pytest.fixture(autouse=True)
def _preserve_generators():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "a sampler drew from the global generator"


def samplers_of_ranks(kind, size, world, epoch=0, **options):
    """Return one sampler per rank."""
    result = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(samplers, "get_dist_info", lambda rank=rank: (rank, world))
            sampler = kind(range(size), **options)
        sampler.set_epoch(epoch)
        result.append(sampler)
    return result


@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_rounded_up_shards_have_equal_length_and_cover_all_samples(size, world, shuffle, epoch):
    ranks = samplers_of_ranks(DefaultSampler, size, world, epoch, shuffle=shuffle, seed=5)
    shards = [list(sampler) for sampler in ranks]
    assert {len(shard) for shard in shards} == {len(sampler) for sampler in ranks} == {-(-size // world)}
    interleaved = [index for column in zip(*shards, strict=True) for index in column]
    order = interleaved[:size]
    assert sorted(order) == list(range(size))
    assert interleaved[size:] == list(itertools.islice(itertools.cycle(order), len(interleaved) - size))
    if not shuffle:
        assert order == list(range(size))


@given(st.integers(1, 40), st.integers(1, 7))
def test_shards_without_rounding_contain_each_sample_once(size, world):
    ranks = samplers_of_ranks(DefaultSampler, size, world, shuffle=True, round_up=False)
    shards = [list(sampler) for sampler in ranks]
    assert sorted(itertools.chain(*shards)) == list(range(size))
    assert [len(shard) for shard in shards] == [len(sampler) for sampler in ranks]


def test_infinite_sampler_reshuffles_each_pass():
    (sampler,) = samplers_of_ranks(InfiniteSampler, 10, 1, seed=3)
    stream = list(itertools.islice(sampler, 30))
    passes = [stream[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert list(itertools.islice(sampler, 30)) == stream
    sampler.set_epoch(1)
    assert list(itertools.islice(sampler, 20)) == passes[1] + passes[2]


def test_infinite_sampler_interleaves_ranks():
    (alone,) = samplers_of_ranks(InfiniteSampler, 7, 1, seed=3)
    ranks = samplers_of_ranks(InfiniteSampler, 7, 2, seed=3)
    columns = zip(*(itertools.islice(r, 10) for r in ranks), strict=True)
    assert [index for column in columns for index in column] == list(itertools.islice(alone, 20))
    assert len(ranks[0]) == 4


def batches(sampler, epoch, start=0):
    sampler.set_epoch(epoch, start)
    return [[(int(i), i.seed, i.epoch) for i in batch] for batch in sampler]


@pytest.mark.parametrize(
    "inner",
    [
        lambda: DefaultSampler(range(11), seed=4),
        lambda: RandomSampler(range(11)),
        lambda: RandomSampler(range(11), generator=torch.Generator().manual_seed(9)),
        lambda: SequentialSampler(range(11)),
    ],
)
@pytest.mark.parametrize("drop_last", [True, False])
def test_start_batch_yields_the_rest_of_the_epoch(inner, drop_last):
    def fresh():
        return EpochBatchSampler(BatchSampler(inner(), 3, drop_last), seed=4, samples=11)

    sampler = fresh()
    if not isinstance(sampler.sampler, SequentialSampler):
        orders = [[[i for i, *_ in batch] for batch in batches(sampler, epoch)] for epoch in (0, 2)]
        assert orders[0] != orders[1]
    for epoch in (2, 0):
        whole = batches(sampler, epoch)
        assert len(whole) == len(sampler)
        assert {(seed, e) for batch in whole for _, seed, e in batch} == {(4, epoch)}
        for start in range(len(whole) + 1):
            assert batches(fresh(), epoch, start) == whole[start:]


def test_each_pass_of_an_infinite_sampler_counts_as_an_epoch():
    inner = InfiniteSampler(range(4), seed=1)
    sampler = EpochBatchSampler(BatchSampler(inner, 2, False), seed=1, samples=4)
    sampler.set_epoch(0, 3)
    stream = list(itertools.islice(sampler, 4))
    assert [batch[0].epoch for batch in stream] == [1, 2, 2, 3]
    assert [i for batch in stream for i in batch] == list(itertools.islice(inner, 14))[6:]
    assert sampler.endless


def test_samplers_that_use_numpys_global_generator_are_reproducible():
    class Shuffled:
        def __iter__(self):
            order = np.random.permutation(12)
            for i in range(0, 12, 3):
                yield [int(j) for j in np.random.permutation(order[i : i + 3])]

        def __len__(self):
            return 4

    sampler = EpochBatchSampler(Shuffled(), seed=0, samples=12)
    whole = batches(sampler, 3)
    np.random.seed(99)
    assert batches(sampler, 3) == whole
    assert batches(sampler, 3, start=2) == whole[2:]
    assert batches(sampler, 4) != whole
    assert sorted(i for batch in whole for i, _, _ in batch) == list(range(12))
    np.random.seed(99)
    batches(sampler, 5)
    assert np.random.rand() == np.random.RandomState(99).rand(), "the global generator was not restored"


@pytest.mark.parametrize("limit", [1, 2, 99])
def test_limit_keeps_the_first_batches_of_each_epoch(limit):
    whole = EpochBatchSampler(BatchSampler(DefaultSampler(range(10), seed=0), 4, False), 0, 10)
    cut = EpochBatchSampler(BatchSampler(DefaultSampler(range(10), seed=0), 4, False), 0, 10, limit=limit)
    assert batches(cut, 1) == batches(whole, 1)[:limit]
    assert len(cut) == min(limit, 3)


class Shuffled(Sampler):
    """A sampler with its own generator."""

    def __init__(self):
        self.rng = random.Random(5)

    def __iter__(self):
        order = list(range(40))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self):
        return 40


class Stateful(Shuffled):
    """A sampler whose generator is not seeded, but whose state can be saved."""

    def __init__(self):
        self.rng = random.Random()

    def state_dict(self):
        return {"rng": self.rng.getstate()}

    def load_state_dict(self, state):
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))


class Buckets:
    """A batch sampler that carries the samples of an incomplete batch over to the next epoch."""

    def __init__(self, sampler):
        self.sampler, self.rest = sampler, []

    def __len__(self):
        return 5

    def __iter__(self):
        for index in self.sampler:
            self.rest.append(index)
            if len(self.rest) == 7:
                yield self.rest
                self.rest = []


def epochs(made, *numbers, start=0):
    result = []
    for epoch in numbers:
        made.set_epoch(epoch, start)
        result.append([list(map(int, batch)) for batch in made])
    return result


@pytest.mark.parametrize("group", [lambda sampler: BatchSampler(sampler, 8, False), Buckets])
def test_sampler_with_its_own_state_continues_and_is_replayed_after_a_resume(group):
    made = EpochBatchSampler(group(Shuffled()), 7, 40)
    orders = epochs(made, 0, 1, 2)
    assert orders[0] != orders[1] != orders[2]
    inner = group(Shuffled())
    assert orders == [list(inner) for _ in range(3)], "the order is not that of the user's sampler"
    resumed = EpochBatchSampler(group(Shuffled()), 7, 40)
    assert epochs(resumed, 2, start=2) == [orders[2][2:]]
    assert epochs(resumed, 3) == epochs(made, 3)


@dataclass
class Unhashable:
    """A batch sampler that cannot be a key of a dict."""

    rest: list[int] = field(default_factory=lambda: list(range(4)))

    def __iter__(self):
        self.rest = self.rest[1:] + self.rest[:1]
        return iter([self.rest])

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def test_batch_sampler_without_a_hash_has_a_state_and_a_beginning():
    used = Unhashable()
    for _ in range(2):
        made = EpochBatchSampler(used, 7, 4)
        assert epochs(made, 0, 1) == [[[1, 2, 3, 0]], [[2, 3, 0, 1]]]
        assert made.state_dict() == {"states": {1: [{"rest": [1, 2, 3, 0]}]}}


@pytest.mark.parametrize("limit", [None, 3])
def test_batch_sampler_with_leftovers_is_drawn_once(limit):
    def fresh(sampler):
        return EpochBatchSampler(sampler, 7, 40, limit=limit)

    whole = epochs(fresh(Buckets(DefaultSampler(range(40), seed=7))), 0, 1, 2)
    if limit is None:
        inner = DefaultSampler(range(40), seed=7)
        plain = Buckets(inner)
        for epoch, order in enumerate(whole):
            inner.set_epoch(epoch)
            assert order == list(plain)
    used = Buckets(DefaultSampler(range(40), seed=7))
    made = fresh(used)
    next(iter(made))  # a hook may read the loader at any time
    assert epochs(made, 0) == whole[:1]
    next(iter(made))
    made.set_epoch(1)
    next(iter(made))
    for sampler in (used, Buckets(DefaultSampler(range(40), seed=7))):
        resumed = fresh(sampler)
        assert epochs(resumed, 1, start=2) == [whole[1][2:]]
        next(iter(resumed))
        assert epochs(resumed, 2) == whole[2:]
    assert epochs(fresh(used), 0, 1, 2) == whole, "a new run does not start from the sampler's initial state"


@pytest.mark.parametrize("saved_after", ["in epoch 1", "epoch 1"])
def test_state_dict_of_a_sampler_is_restored_in_another_process(saved_after, tmp_path):
    made = EpochBatchSampler(BatchSampler(Stateful(), 8, False), 7, 40)
    epochs(made, 0)
    orders = epochs(made, 1)
    save_checkpoint({"state": made.state_dict()}, tmp_path / "state.pth", pytest.fail)
    orders += epochs(made, 2)
    resumed = EpochBatchSampler(BatchSampler(Stateful(), 8, False), 7, 40)
    resumed.load_state_dict(load_checkpoint(tmp_path / "state.pth")["state"])
    if saved_after == "epoch 1":
        assert epochs(resumed, 2) == orders[1:]
    else:
        assert epochs(resumed, 1, start=3) == [orders[0][3:]]
        assert epochs(resumed, 2) == orders[1:]


def test_indices_of_recent_batches_are_recorded():
    made = EpochBatchSampler(BatchSampler(Shuffled(), 8, False), 7, 40)
    orders = epochs(made, 0, 1)
    assert [[made.recent[epoch, i] for i in range(5)] for epoch in (0, 1)] == orders
    assert (2, 0) not in made.recent


def test_repeated_epochs_have_the_same_batches():
    made = EpochBatchSampler(BatchSampler(Shuffled(), 8, False), 7, 40, limit=2)
    made.repeats = True
    first, second = epochs(made, 0, 1)
    assert first == second
    assert len(first) == 2
