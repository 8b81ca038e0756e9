"""Import `mmengine` with the modules that train, evaluate and log replaced by Slipstream's.

All other modules, such as those for configurations, files, datasets and data elements, are those of the installed
MMEngine (`mmengine` or `onedl-mmengine`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from slipstream.errors import MissingPackageError
from slipstream.import_alias import ReplacementFinder, install_finder

__all__ = ["install"]

_WORKERS = str(Path(__file__).parent / "workers")
_ORIGINAL = "_original_"

# Modules of MMEngine, and the modules that define their names. An entry also applies to the submodules.
_REPLACED = MappingProxyType(
    {
        "dataset.sampler": "slipstream.dataset",
        "dist": "slipstream.dist",
        "evaluator.evaluator": "slipstream.evaluator",
        "evaluator.metric": f"{__package__}.evaluator",
        "hooks": f"{__package__}.hooks",
        "infer": f"{__package__}.infer",
        "logging": "slipstream.logging",
        "model.averaged_model": "slipstream.model",
        "model.base_model": f"{__package__}.model",
        "model.base_module": f"{__package__}.model",
        "model.wrappers": f"{__package__}.model",
        "optim": f"{__package__}.optim",
        "optim.scheduler": f"{__package__}.schedulers",
        "registry": f"{__package__}.registry",
        "runner": f"{__package__}.runner",
        "visualization": f"{__package__}.visualization",
        "visualization.vis_backend": "slipstream.visualization",
    }
)

# Submodules of replaced modules that are not replaced.
_INSTALLED = ("runner.activation_checkpointing", "runner.amp", "runner.checkpoint", "visualization.utils")

# Modules that a function in `slipstream.openmmlab.patches` changes after they are loaded.
_PATCHED = MappingProxyType(
    {
        "model.utils": "patch_model_utils",
        "runner.checkpoint": "patch_checkpoint",
        "structures.base_data_element": "patch_data_elements",
        "utils.package_utils": "patch_packages",
    }
)


class _AliasLoader(Loader):
    """Create a module whose names are those of another module, which is imported when a name is first read."""

    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        def read(name: str) -> Any:
            return getattr(importlib.import_module(self._target), name)

        module.__getattr__ = read  # type: ignore[method-assign]


class _PatchLoader(Loader):
    """Load a module of the installed MMEngine, and change it."""

    def __init__(self, loader: Loader, patch: str) -> None:
        self._loader = loader
        self._patch = patch

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        patch: Callable[[ModuleType], None] = getattr(
            importlib.import_module(f"{__package__}.patches"), self._patch
        )
        patch(module)


class _Finder(ReplacementFinder):
    """Find `mmengine` and its submodules.

    `mmengine.infer._original_infer` is the installed `mmengine.infer.infer`, from which the replacement derives.
    """

    name = "mmengine"

    def spec_of(self, fullname: str) -> ModuleSpec:
        package, _, last = fullname.rpartition(".")
        installed = _installed(f"{package}.{last.removeprefix(_ORIGINAL)}" if package else last)
        if installed is None:
            raise ModuleNotFoundError(f"the installed MMEngine has no module {fullname}", name=fullname)
        if last.startswith(_ORIGINAL):
            original = spec_from_file_location(fullname, installed.origin)
            assert original is not None
            return original
        name = fullname.partition(".")[2]
        if (target := _replacement(name)) is not None:
            spec = ModuleSpec(fullname, _AliasLoader(target), origin=target)
            spec.submodule_search_locations = installed.submodule_search_locations
            return spec
        if name in _PATCHED:
            assert installed.loader is not None
            installed.loader = _PatchLoader(installed.loader, _PATCHED[name])
        return installed

    def is_replacement(self, module: ModuleType) -> bool:
        return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _installed(fullname: str) -> ModuleSpec | None:
    """Return the spec of a module of the installed MMEngine, or None if there is none."""
    package = fullname.rpartition(".")[0]
    path = sys.modules[package].__path__ if package else [folder for folder in sys.path if folder != _WORKERS]
    return PathFinder.find_spec(fullname, path)


def _replacement(name: str) -> str | None:
    """Return the module that defines the names of `mmengine.NAME`, or None if it is not replaced."""
    if name in _INSTALLED:
        return None
    while name and name not in _REPLACED:
        name = name.rpartition(".")[0]
    return _REPLACED.get(name)


def install() -> None:
    """Make `import mmengine` import Slipstream's modules where there are any; see `install_finder`.

    Raises:
        ConfigError: if MMEngine has already been imported.
        MissingPackageError: if MMEngine is not installed.
    """
    if _installed("mmengine") is None:
        raise MissingPackageError(
            "MMEngine is not installed; slipstream.openmmlab reads configurations and data with its modules. "
            "Run: pip install 'slipstream[openmmlab]'"
        )
    install_finder(_Finder(), "slipstream.openmmlab", _WORKERS)
