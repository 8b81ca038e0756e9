"""Indices of samples and batches with their seeds, and seeded states of the random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random.bit_generator import ISpawnableSeedSequence

T = TypeVar("T")

_64_BITS = 2**64 - 1


class SampleIndex(int):
    """Sample index that includes the run's seed and the epoch. It is an `int`, so every dataset accepts it."""

    seed: int
    epoch: int

    def __new__(cls, index: int, seed: int, epoch: int) -> SampleIndex:
        """Create the index."""
        self = super().__new__(cls, index)
        self.seed = seed
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[type[SampleIndex], tuple[int, int, int]]:
        return SampleIndex, (int(self), self.seed, self.epoch)


class SampleBatch(list[Any]):
    """The indices of a batch, the epoch, and the seed from which the generators are seeded when the batch is read."""

    def __init__(self, indices: Iterable[Any], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


def sample_rng(index: int) -> np.random.Generator:
    """Return the random generator of one sample. For a plain int, the seed and the epoch are 0.

    It is a counter-based generator (Philox), whose key consists of the seed, the epoch and the index.
    """
    seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
    return np.random.Generator(np.random.Philox(_Key(seed, epoch, int(index))))  # type: ignore[arg-type]


class _Key(ISpawnableSeedSequence):
    """The key of a sample's generator. Creating it takes a third of the time of a `SeedSequence`."""

    def __init__(self, seed: int, epoch: int, index: int) -> None:
        self.numbers = seed, epoch, index

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        """Return the two words of the key, which differ for all epochs and indices that occur."""
        seed, epoch, index = self.numbers
        return np.array([seed & _64_BITS, (epoch * 0x9E3779B97F4A7C15 + index) & _64_BITS], dtype)

    def spawn(self, n_children: int) -> list[Any]:
        """Return the seeds of independent generators."""
        return np.random.SeedSequence(self.numbers).spawn(n_children)


def seed_generators(seed: int, others: Iterable[Any] = ()) -> None:
    """Seed the three global generators and other generators, each differently, from an integer of any size."""
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    torch.default_generator.manual_seed(random.getrandbits(63))
    for generator in others:
        _seed(generator, random.getrandbits)


def hash_numbers(numbers: Sequence[int]) -> int:
    """Return a 32-bit hash of the integers (splitmix64; NumPy's SeedSequence is ten times slower)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ number) + 0x9E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _64_BITS
        mixed ^= mixed >> 31
    return mixed >> 32


class IsolatedGenerators:
    """A private random state for code that draws from the global generators.

    A `with generators:` block uses the private state as the global state, and restores the global state at the end.
    NumPy's bit generator object is swapped, which is sixty times faster than copying its state. The only side effect
    is that the legacy function `np.random.randn` loses its cached second value.

    The private state also includes the generators passed to `include`, such as those in Albumentations' transforms.
    """

    def __init__(self) -> None:
        self._included: Sequence[Any] = ()
        self._numpy = np.random.MT19937(0)
        self._others: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> IsolatedGenerators:
        self._global_state = random.getstate(), np.random.mtrand.get_bit_generator(), torch.get_rng_state()
        self._included_states = [(generator, _state(generator)) for generator in self._included]
        np.random.mtrand.set_bit_generator(self._numpy)
        if self._others is not None:
            random.setstate(self._others[0])
            torch.set_rng_state(self._others[1])
        return self

    def __exit__(self, *error: object) -> None:
        python, numpy, torch_state = self._global_state
        random.setstate(python)
        np.random.mtrand.set_bit_generator(numpy)
        torch.set_rng_state(torch_state)
        for generator, state in reversed(self._included_states):
            _set_state(generator, state)

    def include(self, generators: Sequence[Any]) -> None:
        """Seed these generators, too, and restore them at the end of a block. Call this method inside a block."""
        self._included = generators
        self._included_states += [(generator, _state(generator)) for generator in generators]

    def seed(self, seed: int) -> None:
        """Seed all generators, each differently. Call this method inside a block."""
        seed_generators(seed, self._included)

    def keep(self) -> None:
        """Save the current state for the next block. Call this method inside a block."""
        self._others = random.getstate(), torch.get_rng_state()


def seed_objects(generators: Iterable[Any], numbers: Sequence[int]) -> None:
    """Seed random generators of Python, NumPy or torch, each differently, from non-negative integers."""
    draw = random.Random(hash_numbers(numbers)).getrandbits
    for generator in generators:
        _seed(generator, draw)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, draw: Callable[[int], int]) -> None:
    if isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(draw(32))
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(draw(63))
    elif isinstance(generator.bit_generator, np.random.PCG64):  # a fifth of the time of a new bit generator
        numbers: Any = {"state": draw(128), "inc": 2 * draw(127) + 1}
        generator.bit_generator.state = dict(bit_generator="PCG64", state=numbers, has_uint32=0, uinteger=0)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(draw(64)).state


def isolate_random_state(values: Iterable[T], numbers: Sequence[int]) -> Iterator[T]:
    """Yield `values` with the global generators seeded from `numbers`, and restore the generators after each item."""
    generators = IsolatedGenerators()
    with generators:
        seed_generators(hash_numbers(numbers))
        iterator = iter(values)
        generators.keep()
    while True:
        with generators:
            try:
                value = next(iterator)
            except StopIteration:
                return
            generators.keep()
        yield value
