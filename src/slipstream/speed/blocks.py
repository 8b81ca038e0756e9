"""Which modules of a model are meant by names and classes."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import ConfigError, did_you_mean

__all__ = ["named_blocks"]


def named_blocks(model: nn.Module, words: Sequence[str], place: str) -> list[nn.Module]:
    """Return the modules inside a model that the words name, in the model's order, each once.

    Args:
        model: whose parts they are; it is not one of them.
        words: names of modules, in which `*` and `?` stand for parts of a name between two dots (`layers.*`), or names
            of classes, of which subclasses are meant, too.
        place: of the words, for errors.

    Raises:
        ConfigError: a word names nothing, or a container that is never called.
    """
    known = list(model.named_modules(remove_duplicate=False))[1:]
    classes = {module: {kind.__name__ for kind in type(module).__mro__} for _, module in known}
    found: set[nn.Module] = set()
    for word in words:
        meant = {module for name, module in known if _matches(word, name) or word in classes[module]}
        if not meant:
            near = did_you_mean(word, [*(name for name, _ in known), *(type(m).__name__ for _, m in known)])
            raise ConfigError(f"the model has no module and no class of modules '{word}'{near}", place)
        if any(isinstance(module, nn.ModuleList | nn.ModuleDict) for module in meant):
            raise ConfigError(f"'{word}' only holds modules and is never called: write '{word}.*'", place)
        found |= meant
    return list(dict.fromkeys(module for _, module in known if module in found))


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))
