"""Select a model's modules by name or class."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import ConfigError, did_you_mean
from slipstream.model.wrappers.fully_sharded import repeated_blocks

__all__ = ["find_blocks", "find_modules"]


def find_blocks(
    model: nn.Module, patterns: Sequence[str] | None, path: str, containers: bool = True
) -> list[nn.Module]:
    """Return the modules that match the patterns, or the repeated blocks, in model order, without nested blocks.

    Args:
        model: the model, which is never part of the result.
        patterns, path: see `find_modules`; without patterns, the blocks are those of `repeated_blocks`.
        containers: whether a repeated `Sequential` is a block even if it contains other blocks.

    Raises:
        ConfigError: a pattern matches no module, or the model has no repeated blocks.
    """
    found = set(find_modules(model, patterns, path) if patterns else repeated_blocks(model)) - {model}
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks; list the blocks by name or class", path
        )
    if not containers and not patterns:
        found = {m for m in found if type(m) is not nn.Sequential or found.isdisjoint(list(m.modules())[1:])}
    named = {name: m for name, m in model.named_modules(remove_duplicate=False) if m in found}
    outer = (m for name, m in named.items() if not any(name.startswith(f"{other}.") for other in named))
    return list(dict.fromkeys(outer))


def find_modules(model: nn.Module, patterns: Sequence[str], path: str) -> list[nn.Module]:
    """Return the submodules of a model that match the patterns, in model order, without duplicates.

    Args:
        model: the model, which is never part of the result.
        patterns: module names, in which the wildcards `*` and `?` do not match dots (`layers.*`), or class names,
            which also match subclasses.
        path: config path of the patterns, for error messages.

    Raises:
        ConfigError: a pattern matches no module, or matches a container that is never called.
    """
    known = list(model.named_modules(remove_duplicate=False))[1:]
    classes = {module: {kind.__name__ for kind in type(module).__mro__} for _, module in known}
    found: set[nn.Module] = set()
    for pattern in patterns:
        matches = {module for name, module in known if _matches(pattern, name) or pattern in classes[module]}
        if not matches:
            near = did_you_mean(
                pattern, [*(name for name, _ in known), *(type(m).__name__ for _, m in known)]
            )
            raise ConfigError(f"no module name or class in the model matches '{pattern}'{near}", path)
        if any(isinstance(module, nn.ModuleList | nn.ModuleDict) for module in matches):
            raise ConfigError(f"'{pattern}' is a container that is never called; use '{pattern}.*'", path)
        found |= matches
    return list(dict.fromkeys(module for _, module in known if module in found))


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))
