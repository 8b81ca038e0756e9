"""SuperGradients' front end: its `Trainer`, models, data loaders and callbacks, built on the Runner."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.training import dataloaders as dataloaders
    from slipstream.training.callbacks import Callback as Callback
    from slipstream.training.callbacks import EarlyStop as EarlyStop
    from slipstream.training.callbacks import Phase as Phase
    from slipstream.training.callbacks import PhaseCallback as PhaseCallback
    from slipstream.training.callbacks import PhaseContext as PhaseContext
    from slipstream.training.kd_trainer import KDTrainer as KDTrainer
    from slipstream.training.trainer import Trainer as Trainer
    from slipstream.zoo import models as models

_MODULE_OF = {
    "Callback": "slipstream.training.callbacks",
    "EarlyStop": "slipstream.training.callbacks",
    "KDTrainer": "slipstream.training.kd_trainer",
    "Phase": "slipstream.training.callbacks",
    "PhaseCallback": "slipstream.training.callbacks",
    "PhaseContext": "slipstream.training.callbacks",
    "Trainer": "slipstream.training.trainer",
}
_SUBMODULES = {"dataloaders": "slipstream.training.dataloaders", "models": "slipstream.zoo.models"}

__all__ = [
    "Callback",
    "EarlyStop",
    "KDTrainer",
    "Phase",
    "PhaseCallback",
    "PhaseContext",
    "Trainer",
    "dataloaders",
    "models",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    raise AttributeError(f"module 'slipstream.training' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
