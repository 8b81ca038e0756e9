"""Describe a speed plan as table rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from slipstream.speed.auto import Capabilities
from slipstream.speed.plan import SpeedPlan, idle

__all__ = ["option_rows"]


def option_rows(plan: SpeedPlan, capabilities: Capabilities) -> Iterator[tuple[str, str, str, str]]:
    """Yield the option, value, source and reason for each option that is set, or that `auto` leaves disabled."""
    without_effect = {option: f"no effect here: {why}" for option, why in idle(plan, capabilities)}
    for option in plan.options():
        if option in plan.notes:
            yield option, "off", "auto", plan.notes[option]
        elif option in plan.sources:
            source, _, why = plan.sources[option].partition(": ")
            value = getattr(plan, option)
            off = value is None and option != "fused"
            yield option, "off" if off else _describe(value), source, without_effect.get(option, why)


def _describe(value: Any) -> str:
    """Return an option's value as a short string; for a dataclass, only required fields and non-default values."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "where supported"
    if not is_dataclass(value):
        return str(value)
    texts = []
    for f in fields(value):
        current, default = getattr(value, f.name), _default(f)
        if isinstance(current, Mapping):
            texts += [f"{key}={item}" for key, item in current.items() if key != "type"]
        elif current != default:
            texts.append(str(current) if default is MISSING else f"{f.name}={current}")
    return ", ".join(texts) or "on"


def _default(field: Any) -> Any:
    """Return the default value of a field, or MISSING if the field is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()
