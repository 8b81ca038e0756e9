"""Import hook that creates `super_gradients` and its submodules from `MODULES` in `names.py`."""

from __future__ import annotations

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.import_alias import ReplacementFinder, install_finder
from slipstream.supergradients.names import MODULES, missing_message

__all__ = ["install"]

_WORKERS = str(Path(__file__).parent / "workers")


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
    install_finder(_Finder(), "slipstream.supergradients", _WORKERS)
