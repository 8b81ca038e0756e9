"""Lazy imports for pure Python style configurations: an object is imported when it is read."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["ConfigParsingError", "LazyAttr", "LazyImportError", "LazyObject", "lazy_path"]


class ConfigParsingError(ConfigError, RuntimeError):
    """A pure Python style configuration contains unsupported Python code."""


class LazyImportError(ConfigError, ImportError):  # type: ignore[misc]  # both define `path`
    """An object that a configuration refers to cannot be imported."""


class _Lazy:
    """Base class for names in a configuration that refer to an imported object."""

    location: str | None

    @property
    def module(self) -> str:
        """The module that contains the object."""
        raise NotImplementedError

    def build(self) -> Any:
        """Import and return the object."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> LazyAttr:
        if name.startswith("__"):  # copy, pickle and inspect look up special methods, which must not exist
            raise AttributeError(name)
        return LazyAttr(name, self, self.location)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error.

        Raises:
            ConfigParsingError: always.
        """
        raise ConfigParsingError(
            f"{lazy_path(self)} is imported only after the configuration is read, so the configuration cannot call it; "
            f"write dict(type={self}, ...) instead ({self.location})"
        )

    def __repr__(self) -> str:
        return str(self)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class LazyObject(_Lazy):
    """An imported module or name.

    `import a.b as x` becomes `LazyObject("a.b")`, and `from a import b` becomes `LazyObject("a", "b")`.

    Args:
        module: the module or, for `import` statements without `as`, the list of all imported modules of a package.
        imported: the name that is imported from the module, if any.
        location: file and line of the import statement.

    Raises:
        TypeError: if an argument has the wrong type.
    """

    def __init__(
        self, module: str | Sequence[str], imported: str | None = None, location: str | None = None
    ) -> None:
        modules = [module] if isinstance(module, str) else list(module)
        if not all(isinstance(name, str) for name in modules):
            raise TypeError(f"module must be a string or a list of strings, not {module!r}")
        if imported is not None and not isinstance(imported, str):
            raise TypeError(f"imported must be a string or None, not {imported!r}")
        self._module = module if isinstance(module, str) else modules
        self._imported = imported
        self.location = location

    @property
    def module(self) -> str:
        """The module, or the package if several modules are imported."""
        return self._module if isinstance(self._module, str) else self._module[0].split(".")[0]

    def build(self) -> Any:
        """Import the module, and return it or, if `imported` is set, the object with this name in the module.

        Raises:
            LazyImportError: if the module cannot be imported, or does not contain the name.
        """
        for name in [self._module] if isinstance(self._module, str) else self._module:
            _import(name, self.location)
        target = _import(self.module, self.location)
        return target if self._imported is None else _attribute(target, self._imported, self.location)

    def __str__(self) -> str:
        return self.module if self._imported is None else self._imported


class LazyAttr(_Lazy):
    """An attribute of an imported object, such as `nn.Conv2d` after `import torch.nn as nn`.

    Args:
        name: name of the attribute.
        source: the object.
        location: file and line of the import statement.
    """

    def __init__(self, name: str, source: LazyObject | LazyAttr | Any, location: str | None = None) -> None:
        self.name = name
        self.source = source
        self.location = location

    @property
    def module(self) -> str:
        """The import string of the object that has the attribute."""
        if isinstance(self.source, LazyObject) and self.source._imported is None:
            return self.source.module
        return f"{self.source.module}.{self.source}"

    def build(self) -> Any:
        """Import the object and return its attribute.

        Raises:
            LazyImportError: if the object cannot be imported, or does not have the attribute.
        """
        return _attribute(self.source.build(), self.name, self.location)

    def __str__(self) -> str:
        return self.name


def lazy_path(lazy: LazyObject | LazyAttr | Any) -> str:
    """Return the import string of an object, as it appears in dumped configurations."""
    is_module = isinstance(lazy, LazyObject) and lazy._imported is None
    return str(lazy.module) if is_module else f"{lazy.module}.{lazy}"


def _import(module: str, location: str | None) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise LazyImportError(
            f"importing {module} failed with {type(error).__name__}: {error} ({location})"
        ) from error


def _attribute(target: Any, name: str, location: str | None) -> Any:
    try:
        return getattr(target, name)
    except AttributeError:
        owner = getattr(target, "__name__", type(target).__name__)
        raise LazyImportError(f"{owner} has no attribute '{name}' ({location})") from None
