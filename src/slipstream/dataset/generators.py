"""The global random generators of Python, NumPy and torch's CPU: borrowed, and put back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["borrowed_generators", "in_own_stream", "seed_generators"]

T = TypeVar("T")


def seed_generators(words: Sequence[int]) -> None:
    """Seed the three generators from non-negative numbers."""
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def borrowed_generators() -> Iterator[None]:
    """Put the three generators back as they were when the block ends."""
    before = _get()
    try:
        yield
    finally:
        _set(before)


def in_own_stream(values: Iterable[T], words: Sequence[int]) -> Iterator[T]:
    """Iterate so that whatever `values` draws comes from generators seeded by `words`, not from anyone else's."""
    with borrowed_generators():
        seed_generators(words)
        iterator = iter(values)
        own = _get()
    while True:
        with borrowed_generators():
            _set(own)
            try:
                value = next(iterator)
            except StopIteration:
                return
            own = _get()
        yield value


def _get() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
