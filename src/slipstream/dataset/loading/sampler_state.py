"""The state of user-defined samplers: random generators, which are set for each epoch, and other attributes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.dataset.loading.generator_search import GeneratorKind, find_generators, generator_kind

__all__ = ["SamplerState"]


class SamplerState:
    """Makes the order of the samples depend only on the epoch, even if samplers have their own random generators.

    Epoch 0 uses the state that a generator has when this object is created. Each later epoch uses a state that is
    computed from this initial state, so an epoch has the same order when it is repeated or starts after a resume. A
    torch generator in a sampler's `generator` attribute is not included, because it is seeded from the run's seed.

    Args:
        samplers: a sampler and a batch sampler; objects without attributes are ignored.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "__dict__")]
        self._generators = {
            name: (generator, kind, kind.get(generator))
            for name, generator in self._find_generators().items()
            if (kind := generator_kind(generator)) is not None
        }
        self._attributes = self._copy_attributes()

    def set_epoch(self, epoch: int) -> None:
        """Set the generators to their states at the beginning of an epoch."""
        for generator, kind, initial in self._generators.values():
            if epoch == 0:
                kind.set(generator, initial)
            else:
                digest = hashlib.sha256(f"{_text(initial)} {epoch}".encode()).digest()
                kind.seed(generator, int.from_bytes(digest[:4], "big"))

    def initial_states(self) -> dict[str, Any]:
        """Return the initial state of each generator as built-in Python values and tensors."""
        return {name: _saved(initial) for name, (_, _, initial) in self._generators.items()}

    def restore_initial_states(self, states: Mapping[str, Any]) -> None:
        """Replace the initial states, from which the order of each epoch is computed. Unknown names are ignored.

        Raises:
            ValueError: a state is not valid for its generator. In this case, no state is replaced.
        """
        restored = {}
        for name, (generator, kind, initial) in self._generators.items():
            if name in states:
                state = _restored(states[name], initial, name)
                restored[name] = generator, kind, state
                _check(generator, kind, state, name)
        self._generators |= restored

    def _find_generators(self) -> dict[str, Any]:
        """Return the generators in the samplers' attributes, except those that are seeded from the run's seed."""
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
        known = {id(generator) for generator, _, _ in self._generators.values()}
        return [name for name, generator in self._find_generators().items() if id(generator) not in known]

    def iterators(self) -> list[str]:
        """Return the names of the attributes that are iterators."""
        return [name for name, value in self._copy_attributes().items() if isinstance(value, Iterator)]

    def save_attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of the samplers, with copies of containers."""
        return [{name: _copied(value) for name, value in vars(sampler).items()} for sampler in self._samplers]

    def restore_attributes(self, saved: Sequence[dict[str, Any]]) -> None:
        """Set the attributes to the values that an earlier call to `save_attributes` returned."""
        for sampler, values in zip(self._samplers, saved, strict=True):
            attributes = vars(sampler)
            for name in attributes.keys() - values.keys():
                del attributes[name]
            for name, value in values.items():
                if not (isinstance(value, _CONTAINERS) and _equal(attributes.get(name), value)):
                    attributes[name] = value

    def changed_attributes(self) -> list[str]:
        """Return the names of the attributes that an iteration has changed, such as `Weighted.position`.

        These are numbers, strings and containers whose values have changed since this object was created, and all
        iterators. Generators and `epoch`, which the training loop sets, are not included.
        """
        before = self._attributes
        return [
            name
            for name, value in self._copy_attributes().items()
            if isinstance(value, Iterator) or (name in before and not _equal(before[name], value))
        ]

    def _copy_attributes(self) -> dict[str, Any]:
        return {
            f"{type(sampler).__name__}.{name}": _copied(value)
            for sampler in self._samplers
            for name, value in vars(sampler).items()
            if isinstance(value, (int, float, str, Iterator, *_CONTAINERS)) and name != "epoch"
        }


_MAX_POSITIONS = {"pos": 624, "buffer_pos": 4}
"""Maximum positions in the states of MT19937 and Philox. NumPy does not check the position when a state is set."""
_CONTAINERS = (list, dict, set, deque)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, _CONTAINERS) else value


def _text(state: Any) -> str:
    """Return the entire state as a string; `repr` would abbreviate long arrays."""
    if isinstance(state, dict):
        return repr({key: _text(value) for key, value in state.items()})
    if isinstance(state, tuple | list):
        return repr([_text(value) for value in state])
    return repr(state.tolist()) if hasattr(state, "tolist") else repr(state)


def _saved(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _saved(value) for key, value in state.items()}
    if isinstance(state, tuple | list):
        return [_saved(value) for value in state]
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def _restored(saved: Any, like: Any, name: str) -> Any:
    """Convert `saved`, a result of `_saved`, back to a generator state; `like` is a state with the same structure."""
    if isinstance(like, dict) and isinstance(saved, dict) and saved.keys() == like.keys():
        for key in saved.keys() & _MAX_POSITIONS.keys():
            if not isinstance(saved[key], int) or not 0 <= saved[key] <= _MAX_POSITIONS[key]:
                raise ValueError(f"the state of the sampler's generator {name} has an invalid '{key}'")
        return {key: _restored(saved[key], value, name) for key, value in like.items()}
    if isinstance(like, tuple | list) and isinstance(saved, list) and len(saved) == len(like):
        return type(like)(_restored(*pair, name) for pair in zip(saved, like, strict=True))
    if isinstance(like, np.ndarray | Tensor) and isinstance(saved, Tensor):
        template = torch.from_numpy(like.copy()) if isinstance(like, np.ndarray) else like
        if saved.dtype == template.dtype and saved.shape == template.shape:
            return saved.cpu().numpy() if isinstance(like, np.ndarray) else saved.cpu()
    elif isinstance(saved, int | float | str | None) and not isinstance(like, dict | tuple | list):
        return saved
    raise ValueError(f"the state of the sampler's generator {name} has an unexpected format")


def _check(generator: Any, kind: GeneratorKind, state: Any, name: str) -> None:
    """Check that `state` can be set; the generator keeps its current state."""
    current = kind.get(generator)
    try:
        kind.set(generator, state)
    except Exception as error:  # the state can have any format
        raise ValueError(f"the state of the sampler's generator {name} cannot be set ({error})") from error
    finally:
        kind.set(generator, current)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # containers of arrays cannot be compared
        return True
