"""Import `mmengine` and its submodules from `slipstream.openmmlab.mmengine`."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from slipstream.import_alias import ReplacementFinder, install_finder

__all__ = ["install"]

_NAME = "mmengine"
_TARGET = f"{__package__}.mmengine"
_WORKERS = str(Path(__file__).parent / "workers")


class _AliasLoader(Loader):
    """Load a module under a second name; both names refer to the same module object."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Restore the spec that the import system replaced, because relative imports in the module use the spec.
        module.__spec__ = self._spec


class _Finder(ReplacementFinder):
    """Find `mmengine` and its submodules in `slipstream.openmmlab`."""

    name = _NAME

    def spec_of(self, fullname: str) -> ModuleSpec:
        name = _TARGET + fullname.removeprefix(_NAME)
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise ModuleNotFoundError(
                f"{fullname} is not part of Slipstream's replacement for MMEngine; import the name from a different "
                "module, or run the program with MMEngine",
                name=fullname,
            )
        return ModuleSpec(
            fullname, _AliasLoader(name), is_package=spec.submodule_search_locations is not None
        )

    def is_replacement(self, module: ModuleType) -> bool:
        return module.__name__ == _TARGET


def install() -> None:
    """Make `import mmengine` import `slipstream.openmmlab.mmengine`; see `install_finder`.

    Raises:
        ConfigError: if the real MMEngine has already been imported.
    """
    install_finder(_Finder(), "slipstream.openmmlab", _WORKERS)
