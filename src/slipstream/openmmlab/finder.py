"""Import of `mmengine` and its submodules from `slipstream.openmmlab.mmengine`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType

from slipstream.errors import ConfigError
from slipstream.logging import print_log

__all__ = ["install"]

_NAME = "mmengine"
_TARGET = f"{__package__}.mmengine"
_WORKERS = str(Path(__file__).parent / "workers")


class _AliasLoader(Loader):
    """Load a module under a second name: both names refer to the same module."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the spec, which relative imports in the module use.
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Find `mmengine` and its submodules, whether or not MMEngine is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] != _NAME:
            return None
        name = _TARGET + fullname.removeprefix(_NAME)
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} is not part of Slipstream's replacement of MMEngine; import the name from another module, "
                "or run the program with MMEngine",
                name=fullname,
            )
        return ModuleSpec(
            fullname, _AliasLoader(name), is_package=found.submodule_search_locations is not None
        )


def install() -> None:
    """Make `import mmengine` import `slipstream.openmmlab.mmengine`. Further calls have no effect.

    Processes that are started with `spawn` or `forkserver` receive `sys.path`, but not the finder. Therefore a folder
    with a package `mmengine`, which calls this function, is inserted after the folder of the script.

    Raises:
        ConfigError: MMEngine itself is imported already.
    """
    loaded = sys.modules.get(_NAME)
    if loaded is not None and loaded.__name__ != _TARGET:
        raise ConfigError(
            f"mmengine is already imported from {getattr(loaded, '__file__', 'an unknown file')}, and two versions "
            "cannot be used in one process; import slipstream.openmmlab before mmengine and before any library that "
            "imports it"
        )
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if _WORKERS not in sys.path:
        sys.path.insert(1, _WORKERS)
    if parent_process() is None:  # not again in each worker
        print_log("import mmengine now imports Slipstream (slipstream.openmmlab)", "current")
