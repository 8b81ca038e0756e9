import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, TensorDataset

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


def test_order_depends_only_on_seed_and_epoch():
    def order(seed, epoch):
        (sampler,) = samplers_of_ranks(DefaultSampler, 50, 1, epoch, seed=seed)
        torch.rand(1, generator=torch.Generator())
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (7, 0), (7, 1)]}) == 4


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


def test_infinite_sampler_without_shuffle_keeps_the_order():
    (sampler,) = samplers_of_ranks(InfiniteSampler, 3, 1, shuffle=False)
    assert list(itertools.islice(sampler, 7)) == [0, 1, 2, 0, 1, 2, 0]


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


def test_start_batch_applies_to_one_iteration():
    sampler = EpochBatchSampler(BatchSampler(range(4), 2, False), seed=0, samples=4)
    assert len(batches(sampler, 0, start=1)) == 1
    assert len(list(sampler)) == 2


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


def test_isolated_random_state_continues_between_batches():
    class Uniform:
        def __iter__(self):
            return ([int(np.random.randint(10**6))] for _ in range(20))

    drawn = [int(i) for (i,) in EpochBatchSampler(Uniform(), seed=0, samples=20)]
    assert len(set(drawn)) > 15


@pytest.mark.parametrize("limit", [1, 2, 99])
def test_limit_keeps_the_first_batches_of_each_epoch(limit):
    whole = EpochBatchSampler(BatchSampler(DefaultSampler(range(10), seed=0), 4, False), 0, 10)
    cut = EpochBatchSampler(BatchSampler(DefaultSampler(range(10), seed=0), 4, False), 0, 10, limit=limit)
    assert batches(cut, 1) == batches(whole, 1)[:limit]
    assert len(cut) == min(limit, 3)


def test_limit_divides_an_infinite_sampler_into_different_epochs():
    inner = InfiniteSampler(range(20), seed=0)
    sampler = EpochBatchSampler(BatchSampler(inner, 2, False), seed=0, samples=20, limit=3)
    assert not sampler.endless
    first, second = batches(sampler, 0), batches(sampler, 1)
    assert len(first) == len(second) == len(sampler) == 3
    assert [i for batch in first for i, *_ in batch] != [i for batch in second for i, *_ in batch]


def test_non_integer_keys_are_kept_and_tensors_become_indices():
    sampler = EpochBatchSampler([["a", ("b", 1)], [torch.tensor(3)]], seed=0, samples=3)
    first, second = list(sampler)
    assert first == ["a", ("b", 1)]
    assert (second[0], second[0].seed) == (3, 0)


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


def test_sampler_with_its_own_generator_starts_each_epoch_with_the_same_state():
    made = EpochBatchSampler(BatchSampler(Shuffled(), 40, False), 7, 40)
    orders = []
    for epoch in (0, 1, 2, 0, 1):
        made.set_epoch(epoch)
        orders += list(made)
    assert orders[0] == list(Shuffled())
    assert orders[3:] == orders[:2]
    assert len(set(map(tuple, orders))) == 3


class Seeded(random.Random):
    """A subclass of a generator class."""


class Keeps(Sampler):
    """A sampler that shuffles with the generator `get(kept)`."""

    def __init__(self, kept, get=lambda kept: kept):
        self.kept, self.get = kept, get

    def __iter__(self):
        order = list(range(40))
        self.get(self.kept).shuffle(order)
        return iter(order)

    def __len__(self):
        return 40


def of_class():
    class OfClass(Keeps):
        rng = random.Random(5)

        def __init__(self):
            super().__init__(None, lambda _: self.rng)

    return OfClass()


class Wraps(Keeps):
    def __init__(self):
        super().__init__(RandomSampler(range(40), generator=torch.Generator().manual_seed(3)))

    def __iter__(self):
        return iter(self.kept)


def orders_of(make, epochs):
    made = EpochBatchSampler(BatchSampler(make(), 8, False), 7, 40)
    return [(made.set_epoch(epoch), list(made))[1] for epoch in epochs]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Keeps(SimpleNamespace(rng=random.Random(5)), lambda kept: kept.rng),
        lambda: Keeps([random.Random(5)], lambda kept: kept[0]),
        lambda: Keeps(dict(a=(random.Random(5),)), lambda kept: kept["a"][0]),
        lambda: Keeps(Seeded(5)),
        lambda: Keeps(np.random.default_rng(5)),
        of_class,
        Wraps,
    ],
    ids=["object", "list", "nested containers", "subclass", "numpy", "class attribute", "wrapped sampler"],
)
def test_generators_in_nested_objects_are_set_for_each_epoch(make):
    zero, one, again = orders_of(make, (0, 1, 1))
    assert again == one != zero
    assert orders_of(make, (1,)) == [one]  # as after resuming in a new process
    assert EpochBatchSampler(BatchSampler(make(), 8, False), 7, 40).differing_state(1) == []


def through_a_file(states, folder):
    save_checkpoint({"states": states}, folder / "states.pth", pytest.fail)
    return load_checkpoint(folder / "states.pth")["states"]


UNSEEDED = {
    "random": random.Random,
    "RandomState": np.random.RandomState,
    "PCG64": np.random.default_rng,
    "MT19937": lambda: np.random.Generator(np.random.MT19937()),
    "Philox": lambda: np.random.Generator(np.random.Philox()),
}


@pytest.mark.parametrize("make", UNSEEDED.values(), ids=list(UNSEEDED))
def test_order_of_an_unseeded_generator_is_restored_in_another_sampler(make, tmp_path):
    first, second = (EpochBatchSampler(BatchSampler(Keeps(make()), 8, False), 7, 40) for _ in range(2))
    list(first)  # the generator has already been used when the checkpoint is saved
    orders = []
    for batches in (first, second):
        if batches is second:
            batches.restore_generators(through_a_file(first.generator_states(), tmp_path))
        orders.append([(batches.set_epoch(epoch), list(batches))[1] for epoch in (0, 1)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_order_of_an_unseeded_torch_generator_is_restored(tmp_path):
    def made():
        generator = torch.Generator()
        generator.seed()
        wraps = Wraps()
        wraps.kept = RandomSampler(range(40), generator=generator)
        return EpochBatchSampler(BatchSampler(wraps, 8, False), 7, 40)

    first, second = made(), made()
    assert list(first) != list(second)
    second.restore_generators(through_a_file(first.generator_states(), tmp_path))
    assert list(first) == list(second)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (random.Random, lambda state: state[:2]),
        (random.Random, lambda state: [state[0], [-1] * len(state[1]), state[2]]),
        (np.random.RandomState, lambda state: {**state, "state": {**state["state"], "pos": 10**6}}),
        (
            UNSEEDED["Philox"],
            lambda state: {**state, "buffer_pos": -5},
        ),
        (np.random.default_rng, lambda state: {**state, "bit_generator": "MT19937"}),
        (np.random.default_rng, lambda state: torch.zeros(3)),
    ],
    ids=["short", "negative", "position", "negative position", "other generator", "tensor"],
)
def test_invalid_generator_state_is_rejected_and_changes_nothing(make, change):
    batches = EpochBatchSampler(BatchSampler(Keeps(make()), 8, False), 7, 40)
    before, states = list(batches), batches.generator_states()
    with pytest.raises(ValueError, match=r"the state of the sampler's generator Keeps\.kept"):
        batches.restore_generators({"Keeps.kept": change(states["Keeps.kept"])})
    batches.set_epoch(0)
    assert list(batches) == before


class Lazy(Keeps):
    """A sampler whose first iteration creates its generator."""

    def __init__(self):
        super().__init__(None)

    def __iter__(self):
        self.kept = self.kept or random.Random(5)
        return super().__iter__()


class Closure(Keeps):
    """A sampler whose generator is a local variable of a function."""

    def __init__(self):
        rng = random.Random(5)
        super().__init__(None, lambda _: rng)


class Position(Keeps):
    def __init__(self):
        super().__init__(0)

    def __iter__(self):
        self.kept += 1
        return iter(range(self.kept, 40))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Lazy, ["Lazy.kept"]),
        (Closure, ["Closure"]),
        (Position, ["Position.kept"]),
        (lambda: Keeps(random.SystemRandom()), ["Keeps"]),
        (lambda: Keeps(iter(range(40))), ["Keeps.kept"]),
    ],
    ids=["created late", "closure", "position", "system generator", "iterator"],
)
def test_differing_state_names_the_state_that_changes_the_order_of_a_repeated_epoch(make, names):
    sampler = make()
    made = EpochBatchSampler(BatchSampler(sampler, 8, False), 7, 40)
    before = dict(vars(sampler))
    assert made.differing_state(1) == names
    assert vars(sampler) == before


def test_generators_of_a_samplers_dataset_keep_their_state():
    class Data(TensorDataset):
        rng = random.Random(5)

    sampler = Keeps(SimpleNamespace(rng=random.Random(5), dataset=Data()), lambda kept: kept.rng)
    made = EpochBatchSampler(BatchSampler(sampler, 8, False), 7, 40)
    before = Data.rng.getstate()
    list(made)
    made.set_epoch(1)
    list(made)
    assert Data.rng.getstate() == before


@pytest.mark.parametrize(("round_up", "own", "total"), [(True, 4, 8), (False, 3, 7)])
def test_sampler_attributes_contain_its_dataset_and_sample_counts(round_up, own, total):
    last = samplers_of_ranks(DefaultSampler, 7, 2, round_up=round_up)[-1]
    assert (last.num_samples, last.total_size, last.dataset) == (own, total, range(7))
