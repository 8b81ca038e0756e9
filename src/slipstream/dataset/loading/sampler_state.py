"""The state of user-defined samplers: random generators, which are set for each epoch, and other attributes."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["SamplerState"]


class SamplerState:
    """Makes the order of samplers that have their own random generators a function of the epoch.

    Epoch 0 uses the state that a generator has when this object is created. Each later epoch uses a state computed
    from it, so an epoch that is repeated, or begins after a resume, has the same order. A torch generator in the
    attribute `generator` is left out, because it is seeded from the seed of the run.

    Args:
        samplers: a sampler and a batch sampler; objects without attributes are ignored.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "__dict__")]
        self._generators = {
            id(value): (value, _KINDS[type(value)].get(value))
            for sampler in self._samplers
            for name, value in vars(sampler).items()
            if type(value) in _KINDS and not (name == "generator" and isinstance(value, torch.Generator))
        }
        self._attributes = self._read()

    def set_epoch(self, epoch: int) -> None:
        """Set the generators to the beginning of an epoch."""
        for generator, initial in self._generators.values():
            kind = _KINDS[type(generator)]
            if epoch == 0:
                kind.set(generator, initial)
            else:
                digest = hashlib.sha256(f"{_text(initial)} {epoch}".encode()).digest()
                kind.seed(generator, int.from_bytes(digest[:4], "big"))

    def changed(self) -> list[str]:
        """Return the names of the attributes that an iteration has changed, such as `Weighted.position`.

        These are numbers, text and containers whose values have changed since this object was created, and all
        iterators. Generators and the attributes that the training loop sets are not included.
        """
        before = self._attributes
        return [
            name
            for name, value in self._read().items()
            if isinstance(value, Iterator) or (name in before and not _equal(before[name], value))
        ]

    def _read(self) -> dict[str, Any]:
        return {
            f"{type(sampler).__name__}.{name}": value.copy() if isinstance(value, _CONTAINERS) else value
            for sampler in self._samplers
            for name, value in vars(sampler).items()
            if isinstance(value, (int, float, str, Iterator, *_CONTAINERS)) and name != "epoch"
        }


class _Kind(NamedTuple):
    """Functions for a class of generators."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], Any]
    seed: Callable[[Any, int], Any]


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _seed_bits(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = type(generator.bit_generator)(seed).state


_CONTAINERS = (list, dict, set, deque)
_KINDS: dict[type, _Kind] = {
    random.Random: _Kind(random.Random.getstate, random.Random.setstate, random.Random.seed),
    np.random.RandomState: _Kind(
        np.random.RandomState.get_state, np.random.RandomState.set_state, np.random.RandomState.seed
    ),
    np.random.Generator: _Kind(lambda generator: generator.bit_generator.state, _set_bits, _seed_bits),
    torch.Generator: _Kind(torch.Generator.get_state, torch.Generator.set_state, torch.Generator.manual_seed),
}


def _text(state: Any) -> str:
    """Return the whole state as text; `repr` would shorten long arrays."""
    if isinstance(state, dict):
        return repr({key: _text(value) for key, value in state.items()})
    if isinstance(state, tuple | list):
        return repr([_text(value) for value in state])
    return repr(state.tolist()) if hasattr(state, "tolist") else repr(state)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # containers of arrays cannot be compared
        return True
