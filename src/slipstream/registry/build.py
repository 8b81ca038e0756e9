"""Build an object from a configuration dict; errors name the key that is wrong."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.errors import BuildError, ConfigError, SlipstreamError, did_you_mean
from slipstream.typecheck import describe, matches

if TYPE_CHECKING:
    from slipstream.registry.registry import Registry

__all__ = ["build_from_cfg", "locate"]


def build_from_cfg(cfg: Any, registry: Registry, default_args: Mapping[str, Any] | None = None) -> Any:
    """Build the object that `cfg` describes.

    Args:
        cfg: A dict whose `type` is a registered name, a class or a function; the other keys are its
            arguments. `cfg` is not modified.
        registry: The registry in which names are looked up.
        default_args: Default arguments, which `cfg` overrides; may contain `type`.

    Raises:
        UnknownNameError: The `type` is not registered.
        BuildError: An argument is unknown, missing, of the wrong type, or rejected by the constructor.
    """
    if not isinstance(cfg, Mapping):
        raise BuildError(f"a {registry.name} must be configured with a dict that has a 'type', not {cfg!r}")
    arguments = {**(default_args or {}), **cfg}
    if "type" not in arguments:
        raise _with_source(ConfigError(f"a {registry.name} needs a 'type'; got the keys {sorted(cfg)}"), cfg)
    kind = arguments.pop("type")
    try:
        target = registry.resolve(kind) if isinstance(kind, str) else kind
        _check_arguments(target, arguments)
        return target(**arguments)
    except ConfigError as error:
        raise _with_source(error, cfg) from error.__cause__
    except (TypeError, ValueError) as error:
        if isinstance(error, SlipstreamError):
            raise
        raise _with_source(BuildError(f"{_name(kind)}: {error}"), cfg) from error


def locate(target: Any, tree: Any) -> str | None:
    """Return the dotted path of the object `target` (by identity) inside nested dicts and lists, or None."""
    if target is tree:
        return ""
    items: Any = ()
    if isinstance(tree, Mapping):
        items = ((f".{key}", value) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        items = ((f"[{index}]", value) for index, value in enumerate(tree))
    for key, value in items:
        if (rest := locate(target, value)) is not None:
            return str(key) + rest
    return None


def _with_source(error: ConfigError, cfg: Mapping[str, Any]) -> ConfigError:
    """Store the dict that failed in the error, and extend the error's path if that dict is inside `cfg`."""
    inner = getattr(error, "source", None)
    if inner is not None and (path := locate(inner, cfg)):
        tail = error.path if error.path.startswith("[") or not error.path else f".{error.path}"
        error.path = (path + tail).lstrip(".")
    error.source = cfg  # type: ignore[attr-defined]
    return error


def _check_arguments(target: Any, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    known = signature.parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for key in arguments:
        if key not in known and not open_ended:
            hint = did_you_mean(key, known)
            raise BuildError(f"{_name(target)} has no parameter '{key}'{hint}")
    missing = [
        name
        for name, p in known.items()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and name not in arguments
    ]
    if missing:
        raise BuildError(f"{_name(target)} needs {', '.join(repr(name) for name in missing)}")
    _check_types(target, arguments)


def _check_types(target: Any, arguments: Mapping[str, Any]) -> None:
    # Only annotations of this package are checked; those of other packages are often inexact.
    if not str(getattr(target, "__module__", "")).startswith("slipstream."):
        return
    constructor = target.__init__ if inspect.isclass(target) else target
    for key, value in arguments.items():
        hint = _hint(constructor, key)
        if not matches(value, hint):
            raise BuildError(f"must be {describe(hint)}, not {value!r}", key)


def _hint(constructor: Any, key: str) -> Any:
    """Return the annotation of a parameter, or Any if its type is only imported under TYPE_CHECKING."""
    holder = types.SimpleNamespace(__annotations__={key: constructor.__annotations__.get(key, Any)})
    holder.__module__ = constructor.__module__
    try:
        return typing.get_type_hints(holder, vars(sys.modules[constructor.__module__]))[key]
    except NameError:
        return Any


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
