"""Base classes for modules, which apply `init_cfg` as MMEngine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import slipstream.model.base_module as own
from slipstream.openmmlab.mmengine.model.weight_init import initialize
from slipstream.openmmlab.mmengine.registry import MODELS

__all__ = ["BaseModule", "ModuleDict", "ModuleList", "Sequential"]


class BaseModule(own.BaseModule):
    """Slipstream's `BaseModule`, except that it ignores layer initializers that set neither `layer` nor `override`."""

    def _initialize(self, cfgs: list[Mapping[str, Any]]) -> None:
        initialize(self, cfgs)


@MODELS.register_module()
class Sequential(BaseModule, own.Sequential):
    """`nn.Sequential` with an `init_cfg`."""


@MODELS.register_module()
class ModuleList(BaseModule, own.ModuleList):
    """`nn.ModuleList` with an `init_cfg`."""


@MODELS.register_module()
class ModuleDict(BaseModule, own.ModuleDict):
    """`nn.ModuleDict` with an `init_cfg`."""
