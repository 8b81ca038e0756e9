"""Write a configuration as Python, YAML, JSON or TOML."""

from __future__ import annotations

import inspect
import json
import keyword
import math
import numbers
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from slipstream.config.merge import join
from slipstream.errors import ConfigError, did_you_mean

_WIDTH = 110
# The generated Python source uses these names, so it must not assign to them.
_RESERVED_NAMES = ("dict", "float", "globals")


def to_text(values: dict[Any, Any], suffix: str) -> str:
    """Return `values` as text in the format specified by `suffix`.

    Classes, functions and objects such as `torch.bfloat16` are written as dotted import strings, paths as
    strings, and NumPy numbers as Python numbers. Tuples are preserved in Python and become lists in other formats.

    Raises:
        ConfigError: the format does not support a value; the message names its key.
    """
    if suffix not in _WRITERS:
        hint = did_you_mean(suffix, _WRITERS)
        raise ConfigError(f"configurations can be written as {', '.join(_WRITERS)}, not '{suffix}'{hint}")
    return _WRITERS[suffix](_to_plain(values, suffix, ""))


def _to_plain(value: Any, suffix: str, path: str) -> Any:
    """Return `value` converted to types that the format supports: None, bool, int, float, str, list, tuple and dict."""
    if isinstance(value, dict):
        return {
            _key(key, suffix, path): _to_plain(item, suffix, join(path, key)) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [_to_plain(item, suffix, join(path, index)) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) and suffix == ".py" else items
    if value is None and suffix == ".toml":
        raise ConfigError(
            "TOML does not support None; remove the key, or write to a .py, .yaml or .json file", path
        )
    if value is None or isinstance(value, bool):
        return value
    # Convert to the exact type, because subclasses (NumPy numbers, enums) have a different repr.
    for kind, abstract in ((str, str), (int, numbers.Integral), (float, numbers.Real)):
        if isinstance(value, abstract):
            return str.__str__(value) if isinstance(value, str) else kind(value)  # type: ignore[call-overload]
    return str(value) if isinstance(value, PurePath) else _import_string(value, path)


def _key(key: Any, suffix: str, path: str) -> Any:
    if isinstance(key, str):
        return str.__str__(key)
    if suffix in (".json", ".toml") or not isinstance(key, int | float | None):
        raise ConfigError(f"the key {key!r} cannot be written as {suffix}; use a string", path)
    return key


def _import_string(value: Any, path: str) -> str:
    """Return the import string of a class, a function, or an object whose repr is its import string."""
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.isbuiltin(value):
        name = f"{value.__module__}.{value.__qualname__}"
        if value.__module__ is None or "<" in name:
            raise ConfigError(
                f"{name} cannot be written to a file, because it has no import path; register it", path
            )
        return name
    name = repr(value)
    module, _, attribute = name.rpartition(".")
    if getattr(sys.modules.get(module), attribute, None) is value:
        return name
    raise ConfigError(
        f"a {type(value).__name__} cannot be written to a file; use a dict with a 'type' instead", path
    )


def _to_python(values: dict[str, Any]) -> str:
    assignable = [key for key in values if _is_identifier(key) and key not in _RESERVED_NAMES]
    lines = [f"{key} = {_source(values[key], 0, len(key) + 3)}\n" for key in assignable]
    rest = {key: value for key, value in values.items() if key not in assignable}
    if rest:
        lines.append(f"globals().update({_source(rest, 0, len('globals().update()'))})\n")
    return "".join(lines)


def _is_identifier(key: Any) -> bool:
    # Python normalizes non-ASCII identifiers, which could change the key.
    return isinstance(key, str) and key.isidentifier() and key.isascii() and not keyword.iskeyword(key)


def _source(value: Any, indent: int, lead: int) -> str:
    """Return the Python source of `value`, on several lines if it does not fit on one line after `lead` columns."""
    one_line = _one_line(value)
    opening, items, closing = _split(value)
    if indent + lead + len(one_line) <= _WIDTH or not items:
        return one_line
    pad = " " * (indent + 4)
    lines = [f"{pad}{prefix}{_source(item, indent + 4, len(prefix) + 1)},\n" for prefix, item in items]
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"


def _one_line(value: Any) -> str:
    opening, items, closing = _split(value)
    if not opening:
        # Python has no literals for inf and nan.
        return f"float('{value}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)
    comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
    return f"{opening}{', '.join(prefix + _one_line(item) for prefix, item in items)}{comma}{closing}"


def _split(value: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Return the opening bracket, the items with their prefixes, and the closing bracket of a container."""
    if isinstance(value, dict):
        if all(map(_is_identifier, value)):
            return "dict(", [(f"{key}=", item) for key, item in value.items()], ")"
        return "{", [(f"{_one_line(key)}: ", item) for key, item in value.items()], "}"
    if isinstance(value, list | tuple):
        opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")")
        return opening, [("", item) for item in value], closing
    return "", [], ""


def _to_yaml(values: dict[str, Any]) -> str:
    import yaml

    from slipstream.config.yaml_format import Dumper

    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)


def _to_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=4, ensure_ascii=False) + "\n"


def _to_toml(values: dict[str, Any]) -> str:
    try:
        import tomli_w
    except ImportError:
        raise ConfigError("writing TOML requires tomli_w; run pip install 'slipstream[toml]'") from None
    return tomli_w.dumps(values)


_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".py": _to_python,
    ".yaml": _to_yaml,
    ".yml": _to_yaml,
    ".json": _to_json,
    ".toml": _to_toml,
}
