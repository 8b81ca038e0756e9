"""Information about the environment."""

from __future__ import annotations

from typing import Any

from slipstream.runner.environment import collect_env as collect_own
from slipstream.version import __version__

__all__ = ["collect_env"]


def collect_env() -> dict[str, Any]:
    """Return information about the environment, such as the device and the versions of Python, torch and Slipstream."""
    return {**collect_own(), "MMEngine": f"Slipstream {__version__}"}
