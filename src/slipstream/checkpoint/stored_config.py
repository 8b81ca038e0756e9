"""Read the configuration that is stored in a checkpoint."""

from __future__ import annotations

from typing import Any

import yaml

from slipstream.config.yaml_format import BoundedLoader

__all__ = ["stored_config"]


def stored_config(meta: Any) -> dict[str, Any]:
    """Return the configuration in the `meta` of a checkpoint as plain data, or an empty dict if it cannot be read.

    `_base_` is not followed, nothing is imported, and environment variables are not read: a checkpoint from an
    untrusted source could otherwise insert their values into a file name or a URL.
    """
    try:
        cfg = yaml.load(meta["cfg"], BoundedLoader)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError):
        return {}  # the configuration is missing or contains Python objects
    return cfg if isinstance(cfg, dict) else {}
