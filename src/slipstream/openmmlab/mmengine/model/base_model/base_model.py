"""`BaseModel`, which accepts losses of any shape, as in MMEngine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.model.base_model import BaseModel as OwnModel
from slipstream.model.base_model import run_forward
from slipstream.openmmlab.mmengine.model.base_module import BaseModule
from slipstream.step import sum_losses

__all__ = ["BaseModel"]


class BaseModel(BaseModule, OwnModel):
    """Slipstream's `BaseModel`, except that losses may have any shape and are averaged.

    A layer initializer that sets neither `layer` nor `override` has no effect (see `BaseModule`).
    """

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the means of all losses, and the values to log."""
        return sum_losses({name: _mean(value) for name, value in losses.items()})

    def _run_forward(self, data: Any, mode: str) -> Any:
        return run_forward(self, data, mode)


def _mean(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.mean()
    return [_mean(item) for item in value] if isinstance(value, list | tuple) else value
