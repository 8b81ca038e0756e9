"""SuperGradients' front end: its `Trainer`, models, data loaders and callbacks, built on the Runner."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.training import dataloaders
    from slipstream.training.callbacks import Callback, EarlyStop, Phase, PhaseCallback, PhaseContext
    from slipstream.training.distillation import KDModule
    from slipstream.training.trainer import KDTrainer, Trainer
    from slipstream.zoo import models

_MODULE_OF = {
    **dict.fromkeys(("Callback", "EarlyStop", "Phase", "PhaseCallback", "PhaseContext"), "callbacks"),
    **dict.fromkeys(("KDTrainer", "Trainer"), "trainer"),
    "KDModule": "distillation",
}
__all__ = [
    "Callback", "EarlyStop", "KDModule", "KDTrainer", "Phase", "PhaseCallback", "PhaseContext", "Trainer",
    "dataloaders", "models",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first use, which keeps `import slipstream.training` fast."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    if name in ("dataloaders", "models"):
        return importlib.import_module("slipstream.zoo.models" if name == "models" else f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
