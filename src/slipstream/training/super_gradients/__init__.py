"""The package `super_gradients` that unmodified scripts import; `modules.yaml` lists its modules and their names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from slipstream.errors import did_you_mean
from slipstream.import_alias import ReplacementFinder, install_finder

__all__ = ["MODULES", "install", "missing_message"]

_FOLDER = Path(__file__).parent


def _read_modules() -> dict[str, dict[str, str]]:
    """Return the names of each `super_gradients` module, with the module in which Slipstream defines them."""
    data = yaml.safe_load((_FOLDER / "modules.yaml").read_text(encoding="utf-8"))
    defined = {name: module for module, names in data["definitions"].items() for name in names}
    modules = {}
    for module, groups in data["modules"].items():
        names = [name for group in groups for name in data["groups"].get(group, [group])]
        modules[f"super_gradients.{module}".rstrip(".")] = {
            name.partition("=")[0]: name.partition("=")[2] or f"{defined[name]}:{name}" for name in names
        }
    return modules


# Maps each SuperGradients module to its names, and each name to the Slipstream object that replaces it.
MODULES: Mapping[str, Mapping[str, str]] = _read_modules()


def missing_message(fullname: str) -> str:
    """Return an error message that explains why a SuperGradients name is not available, and what to use instead."""
    parent, _, name = fullname.rpartition(".")
    if modules := [module for module, names in MODULES.items() if name in names]:
        return f"cannot import {fullname}: '{name}' is in {modules[0]}"
    hint = did_you_mean(name, MODULES.get(parent, ()))
    return (
        f"Slipstream's replacement for SuperGradients does not provide {fullname}{hint}; docs/from_supergradients.md "
        "lists the paths that can be imported, and what is not supported (detection, pose estimation, quantization)"
    )


class _Module(ModuleType):
    """A module whose attributes are imported on first use."""

    def __getattr__(self, name: str) -> Any:
        fullname = f"{self.__name__}.{name}"
        if fullname in MODULES:
            return importlib.import_module(fullname)
        target = MODULES.get(self.__name__, {}).get(name)
        if target is None:
            # `from MODULE import NAME` then imports MODULE.NAME, and the finder's ImportError suggests a remedy.
            raise AttributeError(missing_message(fullname))
        module, _, attribute = target.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES.get(self.__name__, ())})


class _Loader(Loader):
    """Creates the modules listed in `MODULES`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = [name for name in MODULES[module.__name__] if not name.startswith("_")]


class _Finder(ReplacementFinder):
    """Finds the modules listed in `MODULES`."""

    name = "super_gradients"

    def spec_of(self, fullname: str) -> ModuleSpec:
        if fullname not in MODULES:
            # Not a ModuleNotFoundError, because `from MODULE import NAME` would replace its message.
            raise ImportError(missing_message(fullname), name=fullname)
        return ModuleSpec(fullname, _Loader(), is_package=True)

    def is_replacement(self, module: ModuleType) -> bool:
        return isinstance(module, _Module)


def install() -> None:
    """Make `import super_gradients` import Slipstream; see `install_finder`.

    Raises:
        ConfigError: the original `super_gradients` package is already imported.
    """
    install_finder(_Finder(), "slipstream.supergradients", str(_FOLDER / "workers"))
