"""Search the attributes of an object for random generators from torch, NumPy and `random`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["GeneratorKind", "find_generators", "generator_kind"]

_MAX_DEPTH = 5
_MAX_ITEMS = 100
"""Maximum length of a container to search. Longer containers are assumed to contain samples rather than generators."""
_MAX_OBJECTS = 1000


class GeneratorKind(NamedTuple):
    """Functions that get and set the state of generators of one class, and that seed them."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], Any]
    seed: Callable[[Any, int], Any]


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _seed_bits(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = type(generator.bit_generator)(seed).state


@cache  # np.random is imported on first use, because it is slow to import
def _kinds() -> dict[type, GeneratorKind]:
    return {
        random.Random: GeneratorKind(random.Random.getstate, random.Random.setstate, random.Random.seed),
        np.random.RandomState: GeneratorKind(
            lambda generator: generator.get_state(legacy=False),
            np.random.RandomState.set_state,
            np.random.RandomState.seed,
        ),
        np.random.Generator: GeneratorKind(
            lambda generator: generator.bit_generator.state, _set_bits, _seed_bits
        ),
        torch.Generator: GeneratorKind(
            torch.Generator.get_state, torch.Generator.set_state, torch.Generator.manual_seed
        ),
    }


# A dataset or model referenced by the sampler has its own generators, which do not determine the sampling order.
_EXCLUDED_TYPES = (
    type,
    ModuleType,
    Tensor,
    np.ndarray,
    nn.Module,
    Dataset,
    DataLoader,
    str,
    bytes,
    int,
    float,
)


def generator_kind(value: Any) -> GeneratorKind | None:
    """Return the functions for a generator, or None for other values, global generators and `SystemRandom`."""
    if isinstance(value, random.SystemRandom) or value is torch.default_generator:
        return None
    if value is getattr(random.seed, "__self__", None) or value is getattr(np.random.mtrand, "_rand", None):
        return None
    return next((kind for base, kind in _kinds().items() if isinstance(value, base)), None)


def find_generators(roots: Sequence[Any], included: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return the generators in the attributes of `roots`, keyed by names such as `Wrapper.inner.rng`.

    The search includes attributes of instances and of their classes, nested objects and short containers. It excludes
    slots, the local variables of functions, and nested datasets, loaders and modules whose type is not in `included`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue = deque((type(root).__name__, root, 0) for root in roots)
    while queue and len(seen) < _MAX_OBJECTS:
        name, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if generator_kind(value) is not None:
            found[name] = value
        elif depth < _MAX_DEPTH:
            queue.extend((name + suffix, child, depth + 1) for suffix, child in _children(value, included))
    return found


def _children(value: Any, included: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Return the attributes and items of `value` that may contain generators, each with a suffix for its name."""
    children: Iterable[tuple[str, Any]]
    if isinstance(value, list | tuple | deque):
        children = ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        children = ((f"[{key!r}]", item) for key, item in value.items())
    else:
        children = ((f".{name}", item) for name, item in _attributes(value))
    if isinstance(value, list | tuple | deque | dict) and len(value) > _MAX_ITEMS:
        return iter(())
    return (
        (suffix, child) for suffix, child in children if isinstance(child, included) or not _is_plain(child)
    )


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for owner in (value, *type(value).__mro__):
        if not isinstance(owner, type) or owner.__module__ not in ("builtins", "typing", "abc"):
            yield from list(getattr(owner, "__dict__", {}).items())


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, _EXCLUDED_TYPES)
        or (callable(value) and not hasattr(value, "__dict__"))
    )
