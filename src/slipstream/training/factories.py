"""The ways in which SuperGradients' recipes name a part: `Name`, `{Name: {...}}`, `{_target_: path.to.Name, ...}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["configuration", "read_factory"]

_FOR_HYDRA = ("_convert_", "_partial_", "_recursive_")


def read_factory(entry: str | Mapping[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a part and its arguments.

    Of `_target_` the last part is the name: nothing is imported from it.

    Args:
        entry: a name, or a dict in one of the two forms.
        place: where the entry stands, for errors.

    Raises:
        ConfigError: `entry` has none of the forms.
    """
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping):
        kept = {key: value for key, value in entry.items() if key not in _FOR_HYDRA}
        target = kept.pop("_target_", None)
        if isinstance(target, str):
            return target.rpartition(".")[2], kept
        if target is None and len(kept) == 1:
            ((name, arguments),) = kept.items()
            if isinstance(name, str) and (arguments is None or isinstance(arguments, Mapping)):
                return name, dict(arguments or {})
    raise ConfigError(
        f"must be a name, {{Name: {{arguments}}}} or {{_target_: path.to.Name, arguments}}, not {entry!r}",
        place,
    )


def configuration(entry: Any, place: str) -> Any:
    """Return an entry as a configuration with `type`; what is one already, or an object, as it is.

    Raises:
        ConfigError: see `read_factory`.
    """
    if not isinstance(entry, str | Mapping) or (isinstance(entry, Mapping) and "type" in entry):
        return entry
    name, arguments = read_factory(entry, place)
    return {"type": name, **arguments}
