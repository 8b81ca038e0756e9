"""A registry maps the `type=` names of a configuration to classes and functions."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.registry.build import build_from_cfg

__all__ = ["Registry", "default_scope", "init_default_scope"]

T = TypeVar("T")

ROOT_SCOPE = "slipstream"
# Configurations written for the predecessors name their scope; it is the root here.
_ROOT_ALIASES = ("mmengine", "super_gradients")

_scope: ContextVar[str | None] = ContextVar("slipstream_default_scope", default=None)


def init_default_scope(scope: str) -> None:
    """Let names without a prefix be looked up in `scope` first, in this context (thread or task)."""
    _scope.set(scope)


@contextmanager
def default_scope(scope: str | None) -> Iterator[None]:
    """Look names without a prefix up in `scope` first, inside the `with` block."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


class Registry:
    """A named table from strings to classes or functions, with one child per downstream library.

    Args:
        name: what the entries are (`"model"`), for error messages.
        build_func: how `build` turns a configuration into an object.
        parent: the registry to ask when a name is not found here.
        scope: the name of the library that registers here (`"mmseg"` in `type="mmseg.FCNHead"`);
            by default the top-level package of the caller.
        locations: modules to import before a lookup fails; importing them registers their classes.
        namespaces: modules whose public classes and functions count as registered (`"torch.optim"`).

    Example:
        >>> MODELS = Registry("model")
        >>> @MODELS.register_module()
        ... class Tiny: ...
        >>> MODELS.build(dict(type="Tiny"))
    """

    def __init__(
        self,
        name: str,
        build_func: Callable[..., Any] | None = None,
        parent: Registry | None = None,
        scope: str | None = None,
        locations: Sequence[str] = (),
        namespaces: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.scope = scope or self.infer_scope()
        self.parent = parent
        self.children: dict[str, Registry] = {}
        self.module_dict: dict[str, Any] = {}
        inherited: Callable[..., Any] = parent.build_func if parent else build_from_cfg
        self.build_func: Callable[..., Any] = build_func or inherited
        self._locations = list(locations)
        self._namespaces = tuple(namespaces)
        if parent is not None:
            parent.children[self.scope] = self

    @staticmethod
    def infer_scope() -> str:
        """Return the top-level package of the code that creates the registry."""
        module = inspect.getmodule(sys._getframe(2))
        return module.__name__.split(".")[0] if module else "__main__"

    @property
    def root(self) -> Registry:
        """The registry at the top of the parent chain."""
        return self.parent.root if self.parent else self

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Any = None,
    ) -> Any:
        """Register `module` under `name` (default: its own name), as a call or as a decorator.

        Raises:
            UnknownNameError: the name is taken by another object and `force` is not set.
        """
        if module is not None:
            return self._register(module, name, force)

        def decorate(obj: T) -> T:
            self._register(obj, name, force)
            return obj

        return decorate

    def _register(self, module: Any, name: str | Sequence[str] | None, force: bool) -> Any:
        if not callable(module):
            raise ConfigError(f"only classes and functions can be registered, not {type(module).__name__}")
        names = [module.__name__] if name is None else [name] if isinstance(name, str) else list(name)
        for key in names:
            taken = self.module_dict.get(key)
            if taken is not None and taken is not module and not force:
                raise UnknownNameError(
                    f"'{key}' is already registered in {self.name} by {taken.__module__}; "
                    "choose another name, or pass force=True to replace it"
                )
            self.module_dict[key] = module
        return module

    def get(self, key: str) -> Any | None:
        """Return what is registered as `key` (`"Name"` or `"scope.Name"`), or None.

        A name without a scope is looked up in the default scope's registry, here, in this registry's
        namespaces, and then in the parents.
        """
        scope, name = self._split(key)
        if scope is not None:
            return self._in_scope(scope)._own(name)
        preferred = _scope.get()
        if preferred is not None and (child := self.root._descendant(preferred)) is not None:
            found = child._upwards(name)
            if found is not None:
                return found
        return self._upwards(name)

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self.module_dict)

    def __repr__(self) -> str:
        return f"Registry(name={self.name!r}, scope={self.scope!r}, entries={sorted(self.module_dict)})"

    def build(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build an object from `cfg`, a dict with a `type`, which is a registered name or a class.

        Raises:
            BuildError, UnknownNameError: with the place in the configuration that failed.
        """
        return self.build_func(cfg, *args, **kwargs, registry=self)

    def resolve(self, key: str) -> Any:
        """Return what is registered as `key`, or raise an error that names the nearest entry.

        Raises:
            UnknownNameError: nothing of that name is registered or importable.
        """
        found = self.get(key)
        if found is None:
            hint = did_you_mean(key, self.names())
            raise UnknownNameError(f"'{key}' is not a registered {self.name}{hint}")
        return found

    def names(self) -> list[str]:
        """Return every name that `get` finds without a scope, sorted."""
        self._import_locations()
        found = set(self.module_dict)
        for module in self._imported_namespaces():
            found.update(n for n in dir(module) if self._public(module, n) is not None)
        return sorted(found | set(self.parent.names() if self.parent else ()))

    def _split(self, key: str) -> tuple[str | None, str]:
        scope, dot, name = key.partition(".")
        if not dot or (self.root._descendant(scope) is None and scope not in _ROOT_ALIASES):
            return None, key
        return scope, name

    def _in_scope(self, scope: str) -> Registry:
        return self.root._descendant(scope) or self.root

    def _descendant(self, scope: str) -> Registry | None:
        if scope == self.scope:
            return self
        return next((d for c in self.children.values() if (d := c._descendant(scope))), None)

    def _upwards(self, name: str) -> Any | None:
        found = self._own(name)
        if found is None and self.parent is not None:
            return self.parent._upwards(name)
        return found

    def _own(self, name: str) -> Any | None:
        if name not in self.module_dict:
            self._import_locations()
        if name in self.module_dict:
            return self.module_dict[name]
        public = (self._public(module, name) for module in self._imported_namespaces())
        return next((obj for obj in public if obj is not None), None)

    def _import_locations(self) -> None:
        while self._locations:
            importlib.import_module(self._locations.pop())

    def _imported_namespaces(self) -> Iterator[Any]:
        for module in self._namespaces:
            try:
                yield importlib.import_module(module)
            except ModuleNotFoundError as error:  # an optional extra that is not installed
                if error.name != module.split(".")[0]:
                    raise

    @staticmethod
    def _public(module: Any, name: str) -> Any | None:
        obj = None if name.startswith("_") else getattr(module, name, None)
        return obj if inspect.isclass(obj) else None
