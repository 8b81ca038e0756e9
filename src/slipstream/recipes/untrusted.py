"""Check recipes before Hydra reads them. Recipes are data and must not execute code or exhaust memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.recipes.find import read_yaml
from slipstream.recipes.interpolations import check_interpolations

__all__ = ["check_files", "check_hydra", "check_search_path"]

_TRUST = "If you trust the recipe, add --trust on the command line, or pass trust=True in Python"
# Hydra imports the packages in `pkg://` entries. Only these packages are allowed.
_PACKAGES = ("pkg://slipstream", "pkg://hydra", "pkg://super_gradients")
_TRUSTED_TARGETS = ("hydra.", "hydra_plugins.", "super_gradients.", "logging.", "colorlog.")
# Keys whose values are imported and called by Hydra or by Python's logging module.
_CALLABLE_KEYS = ("_target_", "()", "class", "factory")


def check_files(path: Path, overrides: Iterable[str], folders: Iterable[Path]) -> None:
    """Check a recipe and the files selected by defaults lists or overrides against limits that Hydra does not enforce.

    Raises:
        ConfigError: if a file is not valid YAML, or exceeds the limits on depth, aliases and interpolations.
    """
    folders = list(folders)
    todo, seen = [(path, "")], set()
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        todo += _option_files(folders, group.partition("@")[0], option)
    while todo:
        file, group = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        values = read_yaml(file)
        check_interpolations(values, str(file))
        for name, option in _defaults(values):
            parent = "" if name.startswith("/") else group
            todo += _option_files(folders, "/".join(filter(None, [parent, name.strip("/")])), option)


def _defaults(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the group and option of each entry in a defaults list; the group is empty for a file outside any group."""
    entries = values.get("defaults")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, str):
            group, _, option = entry.partition("@")[0].rpartition("/")
            yield ("/" if entry.startswith("/") and not group else group), option
        elif isinstance(entry, Mapping):
            for key, options in entry.items():
                group = str(key).split()[-1].partition("@")[0]
                for option in options if isinstance(options, list) else [options]:
                    yield group, str(option)


def _option_files(folders: Iterable[Path], group: str, option: str) -> list[tuple[Path, str]]:
    if "${" in option:  # the option is unknown until Hydra resolves it
        return [(file, group) for folder in folders for file in sorted((folder / group).glob("*.yaml"))]
    inner = "/".join(filter(None, [group, option.rpartition("/")[0]]))
    files = [folder / group / f"{option.removesuffix('.yaml')}.yaml" for folder in folders if option]
    # `Path.is_file` raises an error for names that are too long for the file system.
    return [(file, inner) for file in files if os.path.isfile(file)]  # noqa: PTH113


def check_search_path(entries: Iterable[str], path: Path) -> None:
    """Check the entries of a recipe's `hydra.searchpath`.

    Raises:
        ConfigError: if an entry makes Hydra import a package that is not in `_PACKAGES`.
    """
    for entry in entries:
        own = any(entry == package or entry.startswith(f"{package}.") for package in _PACKAGES)
        if "${" in entry.partition("://")[0] or not (
            own or entry.startswith("file://") or "://" not in entry
        ):
            raise ConfigError(
                f"{path} is not trusted to execute code, but the entry {entry} makes Hydra import code. {_TRUST}",
                "hydra.searchpath",
            )


def check_hydra(settings: Mapping[str, Any], path: Path) -> None:
    """Check the `hydra` section of a composed recipe before its interpolations are resolved.

    Raises:
        ConfigError: if the section makes Hydra import or call code, or set environment variables.
    """
    for key, value in _leaves(settings, "hydra"):
        called = key.rpartition(".")[2] in _CALLABLE_KEYS and not str(value).startswith(_TRUSTED_TARGETS)
        imported = re.search(r"ext://(?!sys\.std(?:out|err)$)", str(value)) is not None
        if called or imported or key.startswith("hydra.job.env_set."):
            raise ConfigError(
                f"{path} is not trusted to execute code, but {value!r} makes Hydra execute code. {_TRUST}",
                key,
            )


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    items: Any = (
        tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    )
    for key, value in items:
        if isinstance(value, Mapping | list):
            yield from _leaves(value, f"{path}.{key}")
        elif value is not None:
            yield f"{path}.{key}", value
