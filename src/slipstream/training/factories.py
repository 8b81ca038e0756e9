"""Factory syntax of SuperGradients' recipes: `Name`, `{Name: {...}}`, `{_target_: path.to.Name, ...}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError
from slipstream.logging import print_log

__all__ = ["configuration", "default_fill_mask", "pop_fixed", "read_factory"]

_HYDRA_KEYS = ("_convert_", "_partial_", "_recursive_")


def read_factory(entry: str | Mapping[str, Any], config_path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a component.

    The name is the last part of `_target_`. Nothing is imported.

    Args:
        entry: a name, `{Name: {arguments}}`, or `{_target_: path.to.Name, ...}`.
        config_path: config path of the entry, for error messages.

    Raises:
        ConfigError: if `entry` has none of these forms.
    """
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping):
        kept = {key: value for key, value in entry.items() if key not in _HYDRA_KEYS}
        if isinstance(target := kept.pop("_target_", None), str):
            return target.rpartition(".")[2], kept
        if len(kept) == 1:
            ((name, arguments),) = kept.items()
            if isinstance(name, str) and (arguments is None or isinstance(arguments, Mapping)):
                return name, dict(arguments or {})
    raise ConfigError(
        f"must be a name, {{Name: {{arguments}}}} or {{_target_: path.to.Name, arguments}}, not {entry!r}",
        config_path,
    )


def configuration(entry: Any, config_path: str) -> Any:
    """Return an entry as a configuration with a `type` key. Configurations and objects are returned unchanged.

    Raises:
        ConfigError: see `read_factory`.
    """
    if not isinstance(entry, str | Mapping) or (isinstance(entry, Mapping) and "type" in entry):
        return entry
    name, arguments = read_factory(entry, config_path)
    return {"type": name, **arguments}


def pop_fixed(arguments: dict[str, Any], supported: Mapping[str, Any], config_path: str) -> None:
    """Remove arguments that support only a single value; raise a ConfigError for other values."""
    for key, value in supported.items():
        if (given := arguments.pop(key, value)) != value:
            raise ConfigError(f"must be {value!r}, not {given!r}", f"{config_path}.{key}")


def default_fill_mask() -> int:
    """Return SuperGradients' default for the `fill_mask` of `SegPadShortToCropSize`, and log a warning."""
    print_log(
        "fill_mask of SegPadShortToCropSize is not set, so the padding has class 0, as in SuperGradients. If class 0 "
        "is not the background, set fill_mask to the loss's ignore_index",
        "current",
        logging.WARNING,
    )
    return 0
