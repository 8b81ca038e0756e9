"""Slipstream: train PyTorch models faster without changing their code.

Public names are imported on first use, which keeps `import slipstream` fast.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import Config as Config
    from slipstream.dataset.loading.feed import feed as feed
    from slipstream.preemption import Preemption as Preemption
    from slipstream.runner import Runner as Runner
    from slipstream.train_step import accelerate as accelerate
    from slipstream.training.trainer import Trainer as Trainer
    from slipstream.tune.api import tune as tune
    from slipstream.version import __version__ as __version__

_MODULES = {
    "Config": "slipstream.config",
    "Preemption": "slipstream.preemption",
    "Runner": "slipstream.runner",
    "Trainer": "slipstream.training.trainer",
    "accelerate": "slipstream.train_step",
    "feed": "slipstream.dataset.loading.feed",
    "__version__": "slipstream.version",
}
_PACKAGES = (
    "apps", "checkpoint", "config", "dataset", "dist", "errors", "evaluator", "hooks", "logging", "model", "optim",
    "preemption", "recipes", "registry", "report", "runner", "speed", "step", "training", "tune", "visualization",
    "zoo",
)  # fmt: skip

__all__ = ["Config", "Preemption", "Runner", "Trainer", "__version__", "accelerate", "feed", "tune"]


def _import(name: str) -> ModuleType:
    """Import a module with garbage collection disabled.

    Imported objects stay alive, so a collection would free nothing. It would take about as long as the import itself,
    because it also traverses torch's objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(_import(_MODULES[name]), name)
    if name in _PACKAGES:
        return _import(f"slipstream.{name}")
    raise AttributeError(f"module 'slipstream' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
