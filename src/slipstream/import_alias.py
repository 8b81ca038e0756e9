"""Replace a package that other programs import, even if it is not installed, and run a script with the replacement."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType

from slipstream.errors import ConfigError
from slipstream.logging import print_log


class ReplacementFinder(MetaPathFinder):
    """Find the package `name` and all of its submodules."""

    # Name of the package that is replaced.
    name: str

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in the package, or None for other packages."""
        return self.spec_of(fullname) if fullname.split(".")[0] == self.name else None

    def spec_of(self, fullname: str) -> ModuleSpec:
        """Return the spec of the module `fullname`, whose top-level package is `name`.

        Raises:
            ImportError: if the replacement does not contain this module.
        """
        raise NotImplementedError

    def is_replacement(self, module: ModuleType) -> bool:
        """Return whether a module named `name` is the replacement."""
        raise NotImplementedError


def install_finder(finder: ReplacementFinder, package: str, worker_folder: str) -> None:
    """Make `import NAME` import the replacement that `finder` provides.

    Further calls with a finder of the same type have no effect. Processes that are started with `spawn` or
    `forkserver` inherit `sys.path`, but not the finder. Therefore, `worker_folder` is inserted into `sys.path` after
    the script's folder.

    Args:
        finder: finds the modules of the replacement.
        package: the package that calls this function, used in messages.
        worker_folder: a folder with a package called NAME that imports `package`. In worker processes, `import NAME`
            finds this package.

    Raises:
        ConfigError: if the original package is already imported.
    """
    name = finder.name
    loaded = sys.modules.get(name)
    if loaded is not None and not finder.is_replacement(loaded):
        raise ConfigError(f"{name} is already imported; import {package} before it and before its libraries")
    if any(type(other) is type(finder) for other in sys.meta_path):
        return
    sys.meta_path.insert(0, finder)
    if worker_folder not in sys.path:
        sys.path.insert(1, worker_folder)
    if parent_process() is None:  # log this only in the main process
        print_log(f"`import {name}` now imports Slipstream ({package})", "current")


def run_script(arguments: Sequence[str], command: str, install: Callable[[], None]) -> None:
    """Call `install`, then run the script `arguments[0]` with the remaining arguments.

    Args:
        arguments: the script and its arguments.
        command: the command that precedes the script, used in messages.
        install: function to call before running the script.

    Raises:
        ConfigError: if no script is given or the file does not exist.
    """
    install()
    if not arguments or not Path(arguments[0]).is_file():
        raise ConfigError(f"no script named {[*arguments, ''][0]!r}; use {command} SCRIPT.py [ARGUMENTS]")
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # Python does the same for a script
    runpy.run_path(arguments[0], run_name="__main__")
