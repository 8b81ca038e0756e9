"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("slipstream")
except PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0+unknown"
