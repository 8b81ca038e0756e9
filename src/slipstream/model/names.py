"""Build a network or a loss, and suggest only names of the same kind for an unknown name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from torch import nn

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.registry import MODELS
from slipstream.typecheck import short_repr

__all__ = ["build_part"]

_MIN_SIMILARITY = 0.6
"""Minimum similarity of a suggestion, as in `difflib.get_close_matches`."""

Kind = Literal["network", "loss"]


def build_part(part: Any, kind: Kind) -> nn.Module:
    """Return a model's network or loss, built if `part` is a configuration.

    Raises:
        UnknownNameError: if the `type` is not registered; the message suggests only names of the same kind.
        ConfigError: if `part` is neither a module nor a configuration, or cannot be built.
    """
    if not callable(part) and not isinstance(part, Mapping):
        raise ConfigError(f"must be a module or a dict with a 'type', not {short_repr(part)}", kind)
    try:
        built: nn.Module = MODELS.build(part) if isinstance(part, Mapping) else part
    except UnknownNameError as error:
        name = part.get("type")
        unknown = f"'{name}' is not a registered "
        if isinstance(name, str) and "." not in name and str(error.args[0]).startswith(unknown):
            error.args = (f"{unknown}{kind}{_hint(name, kind)}",)
        raise
    return built


def _hint(name: str, kind: Kind) -> str:
    """Return a suggestion for an unknown name, or the names of Slipstream's networks or losses."""
    fitting = {known.lower(): known for known in MODELS.names() if _is_loss(known) == (kind == "loss")}
    if close := get_close_matches(name.lower(), fitting, n=1, cutoff=_MIN_SIMILARITY):
        return f"; did you mean '{fitting[close[0]]}'?"
    own = [
        known
        for known in sorted(fitting.values())
        if known in MODELS.module_dict and (kind == "loss" or inspect.isfunction(MODELS.module_dict[known]))
    ]
    plural = "losses" if kind == "loss" else "networks"
    return f"; the {plural} are {', '.join(own)}, the classes in torch.nn, and those that you register"


def _is_loss(name: str) -> bool:
    return "loss" in name.lower() or "entropy" in name.lower()
