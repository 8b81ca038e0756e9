"""Registries that map the `type` names in configurations to classes and functions, and build objects from them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from slipstream.errors import BuildError, ConfigError, SlipstreamError, UnknownNameError, did_you_mean, locate
from slipstream.typecheck import describe_with_article, matches, short_repr

__all__ = ["Registry", "build_from_cfg", "current_scope", "default_scope", "init_default_scope"]

T = TypeVar("T")

ROOT_SCOPE = "slipstream"
# Scopes in MMEngine and SuperGradients configurations, which refer to the root registry.
_ROOT_ALIASES = ("mmengine", "super_gradients")

# Scopes whose child registries are created by the `registry` module of the package with the same name.
LIBRARIES = (
    "mmaction",
    "mmagic",
    "mmdet",
    "mmdet3d",
    "mmocr",
    "mmpose",
    "mmpretrain",
    "mmrotate",
    "mmseg",
    "mmyolo",
)

# Packages whose modules `import_registered` may import. Modules of other packages must already have been imported.
_IMPORTABLE = (*LIBRARIES, "mmcv", "mmengine", "slipstream", "torch", "torchmetrics")

# For each optional package, the extra of this distribution that installs it.
_EXTRAS = {"pytorch_optimizer": "optimizers", "torchmetrics": "metrics"}

_scope: ContextVar[str | None] = ContextVar("slipstream_default_scope", default=None)


def init_default_scope(scope: str) -> None:
    """In this context (thread or task), look up names without a prefix in `scope` first."""
    _scope.set(scope)


def current_scope() -> str | None:
    """Return the default scope of this context, or None if there is none."""
    return _scope.get()


@contextmanager
def default_scope(scope: str | None) -> Iterator[None]:
    """Inside the `with` block, look up names without a prefix in `scope` first."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


class Registry:
    """A mapping from names to classes or functions, with one child registry per downstream library.

    Args:
        name: kind of the entries (`"model"`), for error messages.
        build_func: the function that `build` calls to build an object from a configuration.
        parent: the registry to search for names that are not found in this registry.
        scope: name of the library that registers its objects in this registry (`"mmseg"` in `type="mmseg.FCNHead"`);
            by default the top-level package of the caller.
        locations: modules to import if a name is not found; importing them registers their classes.
        namespaces: modules whose public classes count as registered (`"torch.optim"`).

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
        inherited: Callable[..., Any] = build_from_cfg if parent is None else parent.build_func
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
        return self if self.parent is None else self.parent.root

    @contextmanager
    def switch_scope_and_registry(self, scope: str | None) -> Iterator[Registry]:
        """Yield the registry of `scope`, or this registry if none exists; lookups in the block search `scope` first.

        Args:
            scope: a library's scope; None keeps the current default scope.
        """
        name = _scope.get() if scope is None else scope
        found = self._in_scope(name or "")
        with default_scope(name):
            yield self if found is None else found

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: None = None
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, *, module: T
    ) -> T: ...

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Any = None,
    ) -> Any:
        """Register `module` under `name` (default: its `__name__`). This method can also be used as a decorator.

        Raises:
            UnknownNameError: another object is registered under the name, and `force` is not set.
        """
        if module is not None:
            return self._register(module, name, force)
        if callable(name):
            raise ConfigError(f"{name!r} is not a name; write @register_module() with parentheses")

        def decorate(obj: T) -> T:
            self._register(obj, name, force)
            return obj

        return decorate

    def _register(self, module: Any, name: str | Sequence[str] | None, force: bool) -> Any:
        if not callable(module):
            raise ConfigError(f"only classes and functions can be registered, not {type(module).__name__}")
        names = [module.__name__] if name is None else [name] if isinstance(name, str) else list(name)
        for key in names:
            existing = self.module_dict.get(key)
            if existing is not None and existing is not module and not force:
                # A built-in class is registered at the first lookup, often of another component, whose path
                # would be added to a ConfigError.
                is_own = module.__module__.startswith("slipstream.")
                raise (SlipstreamError if is_own else UnknownNameError)(
                    f"'{key}' is already registered in the {self.name} registry by {existing.__module__}, so "
                    f"{module.__module__} cannot register it; choose a different name, or pass force=True to replace it"
                )
            self.module_dict[key] = module
        return module

    def get(self, key: str) -> Any | None:
        """Return the object registered as `key` (`"Name"` or `"scope.Name"`), or None if there is none.

        A name without a scope is looked up in the registry of the default scope, then in this registry. Each registry
        searches its registered objects first, then its namespaces, and then its parent. A registered object can also
        be looked up by its import string (`"torch.optim.SGD"`).
        """
        registries, name = self._split(key)
        found = (registry._find_in_parents(name) for registry in registries)
        obj = next((obj for obj in found if obj is not None), None)
        return _import_registered(key, self._contains_object) if obj is None and "." in key else obj

    def _contains_object(self, obj: Any) -> bool:
        """Return whether `obj` is registered in this registry or a related registry, under any name."""
        name = getattr(obj, "__name__", "")
        return self.root.contains_object(obj) or self._find_in_parents(name) is obj

    def contains_object(self, obj: Any) -> bool:
        """Return whether this registry or a child registry contains `obj` under any name, without importing modules."""
        is_local = any(obj is registered for registered in self.module_dict.values())
        return is_local or any(child.contains_object(obj) for child in self.children.values())

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self.module_dict)

    def __repr__(self) -> str:
        return f"Registry(name={self.name!r}, scope={self.scope!r}, entries={sorted(self.module_dict)})"

    def build(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build an object from `cfg`, a dict whose `type` is a registered name, a class or a function.

        Raises:
            BuildError, UnknownNameError: the object cannot be built; the message names the config path.
        """
        return self.build_func(cfg, *args, **kwargs, registry=self)

    def resolve(self, key: str) -> Any:
        """Return the object registered as `key`.

        Raises:
            UnknownNameError: the name is neither registered nor importable; the message suggests the nearest entry.
        """
        found = self.get(key)
        if found is None:
            registries, name = self._split(key)
            hint = did_you_mean(name, {known for registry in registries for known in registry.names()})
            extras = "".join(
                f"; if it is part of {package}, run: pip install 'slipstream[{extra}]'"
                for package, extra in _EXTRAS.items()
                if any(registry._is_missing(package) for registry in registries)
            )
            raise UnknownNameError(f"'{key}' is not a registered {self.name}{hint}{extras}")
        return found

    def names(self) -> list[str]:
        """Return the sorted names of all objects in this registry and its parents."""
        self._import_locations()
        found = set(self.module_dict)
        for module in self._imported_namespaces():
            found.update(n for n in dir(module) if self._public(module, n) is not None)
        return sorted(found | set(() if self.parent is None else self.parent.names()))

    def _is_missing(self, package: str) -> bool:
        """Return whether this registry or a parent has a namespace in `package`, and `package` is not installed."""
        if any(module.split(".")[0] == package for module in self._namespaces):
            return importlib.util.find_spec(package) is None
        return self.parent is not None and self.parent._is_missing(package)

    def _split(self, key: str) -> tuple[Sequence[Registry], str]:
        """Return the registries in which to look up `key`, in order, and the name without the scope."""
        scope, dot, name = key.partition(".")
        if dot and (registry := self._in_scope(scope)) is not None:
            return [registry], name
        preferred = self._in_scope(_scope.get() or "")
        # The root must not come first, even as the default scope, because it would hide overrides in a child registry.
        return [self] if preferred in (None, self.root) else [preferred, self], key

    def _in_scope(self, scope: str) -> Registry | None:
        found = self.root._descendant(scope)
        if found is None and scope in LIBRARIES and importlib.util.find_spec(scope) is not None:
            importlib.import_module(f"{scope}.registry")  # creates the library's child registries
            # A library has child registries for only some kinds of objects. For other kinds, it uses MMEngine's
            # registries.
            found = self.root._descendant(scope)
            found = self.root._descendant("mmengine") if found is None else found
        return self.root if found is None and scope in _ROOT_ALIASES else found

    def _descendant(self, scope: str) -> Registry | None:
        if scope == self.scope:
            return self
        # Compare with None, because a registry whose locations have not been imported yet may be empty, and thus falsy.
        return next((d for c in self.children.values() if (d := c._descendant(scope)) is not None), None)

    def _find_in_parents(self, name: str) -> Any | None:
        found = self._find_own(name)
        if found is None and self.parent is not None:
            return self.parent._find_in_parents(name)
        return found

    def _find_own(self, name: str) -> Any | None:
        if name not in self.module_dict:
            self._import_locations(name)
        if name in self.module_dict:
            return self.module_dict[name]
        public = (self._public(module, name) for module in self._imported_namespaces())
        return next((obj for obj in public if obj is not None), None)

    def _import_locations(self, name: str | None = None) -> None:
        """Import the locations, from last to first, until one of them registers `name` (None: import all)."""
        while self._locations and name not in self.module_dict:
            location = self._locations.pop()  # remove it before the import, which may use this registry
            try:
                importlib.import_module(location)
            except BaseException:
                self._locations.append(location)  # restore it, so that the next lookup raises the same error
                raise

    def _imported_namespaces(self) -> Iterator[Any]:
        for module in self._namespaces:
            try:
                with warnings.catch_warnings():
                    # Importing torch.distributed.optim issues a deprecation warning.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    found = importlib.import_module(module)
            except ModuleNotFoundError as error:  # the package of an optional extra may be missing
                if error.name != module.split(".")[0]:
                    raise
                continue
            yield found

    @staticmethod
    def _public(module: Any, name: str) -> Any | None:
        exported = name in getattr(module, "__all__", (name,)) and not name.startswith("_")
        obj = getattr(module, name, None) if exported else None
        return obj if inspect.isclass(obj) else None


def _import_registered(name: str, is_registered: Callable[[Any], bool]) -> Any | None:
    """Return the object that an import string refers to, or None if it does not exist or is not registered.

    The import string may come from an untrusted configuration, so objects that are not registered are not returned.
    """
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:count]))
        if module is None:
            continue
        obj: Any = module
        for part in parts[count:]:
            obj = getattr(obj, part, None)
        return obj if callable(obj) and is_registered(obj) else None
    return None


def _module(name: str) -> Any | None:
    if name in sys.modules:
        return sys.modules[name]
    package, *rest = name.split(".")
    if package not in _IMPORTABLE or "__main__" in rest:
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If `name` ends with a class name, it is not a module. Errors for other missing modules are re-raised.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


# ---- build objects from configurations ----------------------------------------------------------------


def build_from_cfg(cfg: Any, registry: Registry, default_args: Mapping[str, Any] | None = None) -> Any:
    """Build the object that `cfg` describes.

    Args:
        cfg: a dict whose `type` is a registered name, a class or a function; the other keys are its
            arguments. `cfg` is not modified. The `_scope_` key, which is not an argument, sets the default scope
            while the object is built.
        registry: the registry in which names are looked up.
        default_args: default arguments, which `cfg` overrides; may contain `type`.

    Raises:
        UnknownNameError: the `type` is not registered.
        BuildError: an argument is unknown, missing, of the wrong type, or rejected by the constructor.
    """
    if not isinstance(cfg, Mapping):
        raise BuildError(
            f"{_with_article(registry.name)} must be configured with a dict that has a 'type', not {short_repr(cfg)}"
        )
    arguments = {**(default_args or {}), **cfg}
    if "type" not in arguments:
        raise _with_source(
            ConfigError(f"{_with_article(registry.name)} needs a 'type'; got the keys {list(cfg)}"), cfg
        )
    scope = arguments.pop("_scope_", None)
    if scope is not None:
        with registry.switch_scope_and_registry(str(scope)) as scoped:
            return _call(cfg, arguments, scoped)
    return _call(cfg, arguments, registry)


def _with_article(name: str) -> str:
    return f"{'an' if name.startswith(tuple('aeiou')) else 'a'} {name}"


def _call(cfg: Mapping[str, Any], arguments: dict[str, Any], registry: Registry) -> Any:
    """Call `arguments['type']` with the other arguments; errors name their location in `cfg`."""
    kind = arguments.pop("type")
    try:
        target = registry.resolve(kind) if isinstance(kind, str) else kind
        if not callable(target):
            raise BuildError(
                f"{short_repr(kind)} is not callable; use a registered name, a class or a function", "type"
            )
        _check_arguments(target, arguments)
        return target(**arguments)
    except ConfigError as error:
        raise _with_source(error, cfg) from error.__cause__
    except _ARGUMENT_ERRORS as error:
        if isinstance(error, SlipstreamError) or type(error).__name__ == "OutOfMemoryError":
            raise
        reason = (
            str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"
        )
        raise _with_source(BuildError(f"{_name(kind)}: {reason}"), cfg) from error


# Exceptions from constructors that are reported with the config path; others (such as OSError) propagate unchanged.
_ARGUMENT_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)


def _with_source(error: ConfigError, cfg: Mapping[str, Any]) -> ConfigError:
    """Store `cfg` in the error, and extend the error's path if the previously stored dict is inside `cfg`."""
    inner = getattr(error, "source", None)
    if inner is not None and (path := locate(inner, cfg)):
        tail = error.path if error.path.startswith("[") or not error.path else f".{error.path}"
        error.path = (path + tail).lstrip(".")
    error.source = cfg
    return error


def _check_arguments(target: Any, arguments: Mapping[str, Any]) -> None:
    try:
        known = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    accepts_kwargs = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise BuildError(f"parameter names must be strings, not {short_repr(key)}")
        if key not in known and not accepts_kwargs:
            raise BuildError(f"{_name(target)} has no parameter '{key}'{did_you_mean(key, known)}")
        # Annotations in other packages are often inexact, so arguments are not checked against them.
        is_own = str(getattr(target, "__module__", "")).startswith("slipstream.")
        if is_own and not matches(value, hint := _hint(target, key)):
            raise BuildError(f"must be {describe_with_article(hint)}, not {short_repr(value)}", key)


def _hint(target: Any, key: str) -> Any:
    """Return the annotation of a parameter, or Any if its type is imported only under TYPE_CHECKING.

    If a class accepts a parameter through `**kwargs`, the annotation is read from a base class.
    """
    functions = (
        [vars(base).get("__init__") for base in target.__mro__] if inspect.isclass(target) else [target]
    )
    function = next((f for f in functions if key in getattr(f, "__annotations__", ())), None)
    if function is None:
        return Any
    holder = types.SimpleNamespace(__annotations__={key: function.__annotations__[key]})
    module = vars(sys.modules[function.__module__])
    try:
        return typing.get_type_hints(holder, module, include_extras=True)[key]
    except NameError:
        return Any


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
