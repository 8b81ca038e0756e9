"""Measure a training run to find the fastest options, the fastest batch size and a good learning rate.

The module is callable: `slipstream.tune(model, loader, optimizer, loss_fn)` calls `slipstream.tune.tune`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from slipstream.tune.api import find_batch_size, find_lr, parse_budget, tune, tune_config
from slipstream.tune.batch_size import BatchSizes
from slipstream.tune.lr_range import LrRange
from slipstream.tune.options import OPTIONS
from slipstream.tune.result import TuneResult, read_tuned
from slipstream.tune.search import Outcome, Row

__all__ = [
    "OPTIONS", "BatchSizes", "LrRange", "Outcome", "Row", "TuneResult", "find_batch_size", "find_lr",
    "parse_budget", "read_tuned", "tune", "tune_config",
]  # fmt: skip


class _CallableModule(ModuleType):
    """The module class of `slipstream.tune`, which makes the package callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> TuneResult:
        return tune(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
