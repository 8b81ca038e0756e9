"""Read the configuration that is stored in a checkpoint."""

from __future__ import annotations

from typing import Any

__all__ = ["stored_config"]


def stored_config(meta: Any) -> dict[str, Any]:
    """Return the configuration in a checkpoint's `meta` entry as plain data, or an empty dict if it cannot be read.

    This function does not follow `_base_`, import modules or read environment variables. Otherwise, an untrusted
    checkpoint could insert the values of environment variables into a file name or a URL.
    """
    import yaml  # imported here, because a Runner without configuration files does not need it

    from slipstream.config.yaml_format import Loader

    try:
        cfg = yaml.load(meta["cfg"], Loader)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError):
        return {}  # the configuration is missing or contains Python objects
    return cfg if isinstance(cfg, dict) else {}
