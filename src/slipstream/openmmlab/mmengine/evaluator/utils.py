"""Look up a metric value by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["get_metric_value"]


def get_metric_value(indicator: str, metrics: Mapping[str, Any]) -> Any:
    """Return a metric value by its full name, such as `coco/bbox_mAP`, or by its name without the prefix.

    Raises:
        ConfigError: if no metric or more than one metric has this name.
    """
    found = [name for name in metrics if indicator in (name, name.split("/")[-1])]
    if len(found) != 1:
        raise ConfigError(
            f"'{indicator}' must match exactly one metric, but matches {len(found)} of {sorted(metrics)}"
        )
    return metrics[found[0]]
