"""Queries for installed packages."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from slipstream.errors import MissingPackageError

__all__ = ["get_installed_path", "is_installed"]


def is_installed(package: str) -> bool:
    """Return whether a distribution or a module with this name is installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return importlib.util.find_spec(package.replace("-", "_")) is not None
    return True


def get_installed_path(package: str) -> str:
    """Return the folder of an installed package.

    Raises:
        MissingPackageError: if the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"the package '{package}' is not installed; install it with pip")
    return str(Path(spec.origin).parent)
