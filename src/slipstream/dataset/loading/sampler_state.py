"""The state of user-defined samplers: random generators, which are set for each epoch, and other attributes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slipstream.dataset.loading.generator_search import find_generators, generator_kind

__all__ = ["SamplerState"]


class SamplerState:
    """Makes the order of samplers that have their own random generators a function of the epoch.

    Epoch 0 uses the state that a generator has when this object is created. Each later epoch uses a state computed
    from it, so an epoch that is repeated, or begins after a resume, has the same order. A torch generator in the
    attribute `generator` of a sampler is left out, because it is seeded from the seed of the run.

    Args:
        samplers: a sampler and a batch sampler; objects without attributes are ignored.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "__dict__")]
        self._generators = [
            (generator, kind, kind.get(generator))
            for generator in self._found().values()
            if (kind := generator_kind(generator)) is not None
        ]
        self._attributes = self._read()

    def set_epoch(self, epoch: int) -> None:
        """Set the generators to the beginning of an epoch."""
        for generator, kind, initial in self._generators:
            if epoch == 0:
                kind.set(generator, initial)
            else:
                digest = hashlib.sha256(f"{_text(initial)} {epoch}".encode()).digest()
                kind.seed(generator, int.from_bytes(digest[:4], "big"))

    def _found(self) -> dict[str, Any]:
        """Return the generators in the samplers' attributes, except those that are seeded from the seed of the run."""
        seeded = [vars(sampler).get("generator") for sampler in self._samplers]
        seeded = [generator for generator in seeded if isinstance(generator, torch.Generator)]
        found = find_generators(self._samplers)
        return {
            name: value
            for name, value in found.items()
            if all(value is not generator for generator in seeded)
        }

    def new_generators(self) -> list[str]:
        """Return the names of the generators that did not exist when this object was created."""
        known = {id(generator) for generator, _, _ in self._generators}
        return [name for name, generator in self._found().items() if id(generator) not in known]

    def iterators(self) -> list[str]:
        """Return the names of the attributes that are iterators."""
        return [name for name, value in self._read().items() if isinstance(value, Iterator)]

    def save_attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of the samplers, with copies of containers."""
        return [{name: _copied(value) for name, value in vars(sampler).items()} for sampler in self._samplers]

    def restore_attributes(self, saved: Sequence[dict[str, Any]]) -> None:
        """Set the attributes to the values of an earlier `save_attributes`."""
        for sampler, values in zip(self._samplers, saved, strict=True):
            attributes = vars(sampler)
            for name in attributes.keys() - values.keys():
                del attributes[name]
            for name, value in values.items():
                if not (isinstance(value, _CONTAINERS) and _equal(attributes.get(name), value)):
                    attributes[name] = value

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
            f"{type(sampler).__name__}.{name}": _copied(value)
            for sampler in self._samplers
            for name, value in vars(sampler).items()
            if isinstance(value, (int, float, str, Iterator, *_CONTAINERS)) and name != "epoch"
        }


_CONTAINERS = (list, dict, set, deque)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, _CONTAINERS) else value


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
