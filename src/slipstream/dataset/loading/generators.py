"""The global random generators of Python, NumPy and torch's CPU: borrowed, and put back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import mtrand

__all__ = ["OwnGenerators", "in_own_stream", "seed_generators"]

T = TypeVar("T")

_64_BITS = 2**64 - 1


def seed_generators(words: Sequence[int]) -> None:
    """Seed the three generators from non-negative numbers."""
    seed = _mixed(words)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _mixed(words: Sequence[int]) -> int:
    """Return 32 bits in which each bit of each word counts (splitmix64; NumPy's SeedSequence is ten times slower)."""
    mixed = 0
    for word in words:
        mixed = (mixed ^ word) + 0x9E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _64_BITS
        mixed ^= mixed >> 31
    return mixed >> 32


class OwnGenerators:
    """A stream of random numbers of one's own, lent to code that draws from the global generators.

    `with own:` puts it in the place of the global state and takes it out again, advanced by what was drawn.
    NumPy's part is exchanged as a whole, which is sixty times faster than copying its state; the only thing
    lost is the second number of a pair that the legacy `np.random.randn` may hold back.
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        self._others: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> OwnGenerators:
        self._outside = random.getstate(), mtrand.get_bit_generator(), torch.get_rng_state()
        mtrand.set_bit_generator(self._numpy)
        if self._others is not None:
            random.setstate(self._others[0])
            torch.set_rng_state(self._others[1])
        return self

    def __exit__(self, *error: object) -> None:
        python, numpy, torch_state = self._outside
        random.setstate(python)
        mtrand.set_bit_generator(numpy)
        torch.set_rng_state(torch_state)

    def keep(self) -> None:
        """Inside the block: remember where the stream stands, for the next block to go on from there."""
        self._others = random.getstate(), torch.get_rng_state()


def in_own_stream(values: Iterable[T], words: Sequence[int]) -> Iterator[T]:
    """Iterate so that whatever `values` draws comes from generators seeded by `words`, not from anyone else's."""
    own = OwnGenerators()
    with own:
        seed_generators(words)
        iterator = iter(values)
        own.keep()
    while True:
        with own:
            try:
                value = next(iterator)
            except StopIteration:
                return
            own.keep()
        yield value
