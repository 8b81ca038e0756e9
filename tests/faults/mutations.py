"""Random, reproducible changes to a configuration: keys are removed, misspelled or added, and values are replaced."""

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

VALUES = (
    None, True, False, 0, 1, -1, 2, -7, 0.5, 2.5, -0.5, math.nan, math.inf, -math.inf, 10**18, 1e300, 2**70,
    "", "abc", "1", "1e-3", "nan", "false", "auto", "none", "\0", "é" * 300, b"1", (), [], [1], [None], [[]], ["abc"],
    [-1], [math.nan], {}, {"type": "Abc"}, {"type": None}, {"type": 3}, {"abc": 1}, {1: 2}, {None: None}, {"type": {}},
    {"type": "slipstream."}, [{}], [{"type": "Abc"}], object(),
)  # fmt: skip
"""Replacements for a value in a valid configuration."""


class Mutation(NamedTuple):
    """One change to a configuration."""

    kind: str
    path: tuple[Any, ...]
    value: Any

    def __str__(self) -> str:
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path).lstrip(".")
        return f"{self.kind} {where} {self.value!r:.60}"

    def names(self) -> set[str]:
        """Return the names that an error about this mutation may contain."""
        own = {str(self.value)} if self.kind in ("rename", "add") else set()
        return own | {key for key in self.path if isinstance(key, str)}


def copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists. Other objects are shared."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*prefix, key)
        yield from paths(item, (*prefix, key))


def parent(cfg: Any, path: tuple[Any, ...]) -> Any:
    """Return the dict or list that contains the entry at `path`."""
    for key in path[:-1]:
        cfg = cfg[key]
    return cfg


def mutated(cfg: dict[str, Any], rng: random.Random, count: int) -> tuple[dict[str, Any], list[Mutation]]:
    """Return a copy of `cfg` with `count` random mutations, and a list of the mutations."""
    cfg = copied(cfg)
    done = []
    for _ in range(count):
        everywhere = [path for path in paths(cfg) if path != ("work_dir",)]
        if everywhere:
            done.append(_mutate(cfg, rng, everywhere))
    return cfg, done


def every_replacement(cfg: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Mutation]]:
    """For each entry of `cfg` and each value in `VALUES`, yield a copy in which the value replaces the entry."""
    for path in paths(cfg):
        for value in VALUES:
            changed = copied(cfg)
            parent(changed, path)[path[-1]] = copied(value)
            yield changed, Mutation("replace", path, value)


def _mutate(cfg: dict[str, Any], rng: random.Random, everywhere: list[tuple[Any, ...]]) -> Mutation:
    path = rng.choice(everywhere)
    holder, key = parent(cfg, path), path[-1]
    kinds = ["replace"] * 6 + ["remove", "wrap", "swap"] + ["rename", "add", "add"] * isinstance(holder, dict)
    kind = rng.choice(kinds)
    value: Any = None
    if kind == "replace":
        value = rng.choice(VALUES)
        holder[key] = copied(value)
    elif kind == "remove":
        del holder[key]
    elif kind == "wrap":
        value = rng.choice(["list", "dict", "str"])
        holder[key] = {"list": [holder[key]], "dict": {"abc": holder[key]}, "str": str(holder[key])}[value]
    elif kind == "swap":
        value = rng.choice(everywhere)
        holder[key] = copied(parent(cfg, value)[value[-1]])
    elif kind == "rename":
        value = misspelled(str(key), rng)
        holder[value] = holder.pop(key)
    else:
        value = rng.choice([str(rng.choice(everywhere)[-1]), "abc", "type", 3, "", "a.b", "_x", "cfg"])
        holder[value] = copied(rng.choice(VALUES))
    return Mutation(kind, path, value)


def misspelled(word: str, rng: random.Random) -> str:
    """Return `word` with one letter dropped, doubled, swapped with the next letter, or changed in case."""
    at = rng.randrange(len(word)) if word else 0
    tails = (word[at + 1 :], word[at:], word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :])
    return word[:at] + rng.choice([*tails, word[at : at + 1].swapcase() + word[at + 1 :]])


def summary(name: str, inputs: int, findings: int) -> str:
    """Return the last line of a fuzzer's output."""
    return f"{name}: {inputs} inputs, {findings} findings"
