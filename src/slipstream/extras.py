"""Optional dependencies, which are installed through extras such as `slipstream[all]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from slipstream.errors import MissingPackageError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """If a module that the block imports is not installed, raise an error that names the extra to install.

    Raises:
        MissingPackageError: if a module that the block imports is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{error.name} is not installed; run: pip install 'slipstream[{name}]'"
        ) from error


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    return find_spec(module) is not None
