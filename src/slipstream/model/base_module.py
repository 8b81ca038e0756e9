"""Modules with configurable weight initialization."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from slipstream.registry import MODELS
from slipstream.typecheck import check

__all__ = ["BaseModule", "ModuleDict", "ModuleList", "Sequential"]


class BaseModule(nn.Module):
    """An `nn.Module` with an `init_cfg`, which `init_weights` applies once, before the `init_cfg` of child modules.

    Pretrained weights are loaded last, so the `init_cfg` of a child does not overwrite them.
    """

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__()
        several = isinstance(init_cfg, list | tuple)
        for cfg in init_cfg if several else [init_cfg]:
            check(cfg, Mapping if several else Mapping | None, "init_cfg")
        self.init_cfg = copy.deepcopy(init_cfg)
        self._is_init = False

    @property
    def is_init(self) -> bool:
        """Whether `init_weights` has been called."""
        return self._is_init

    def init_weights(self) -> None:
        """Apply `init_cfg` to this module, then initialize its children; later calls have no effect."""
        if self._is_init:
            return
        self._is_init = True
        from slipstream.model.weight_init import PretrainedInit

        cfgs = [self.init_cfg] if isinstance(self.init_cfg, Mapping) else self.init_cfg or []
        kinds = ("Pretrained", "PretrainedInit", PretrainedInit)
        self._initialize([cfg for cfg in cfgs if cfg.get("type") not in kinds])
        for child in self.children():
            init = getattr(child, "init_weights", None)
            if callable(init) and not getattr(child, "is_init", False):
                init()
        self._initialize([cfg for cfg in cfgs if cfg.get("type") in kinds])

    def _initialize(self, cfgs: list[Mapping[str, Any]]) -> None:
        from slipstream.model.weight_init import initialize

        initialize(self, cfgs)


@MODELS.register_module()
class Sequential(BaseModule, nn.Sequential):
    """`nn.Sequential` with an `init_cfg`."""

    def __init__(self, *args: nn.Module, init_cfg: Any = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.Sequential.__init__(self, *args)


@MODELS.register_module()
class ModuleList(BaseModule, nn.ModuleList):
    """`nn.ModuleList` with an `init_cfg`."""

    def __init__(self, modules: Any = None, init_cfg: Any = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.ModuleList.__init__(self, modules)


@MODELS.register_module()
class ModuleDict(BaseModule, nn.ModuleDict):
    """`nn.ModuleDict` with an `init_cfg`."""

    def __init__(self, modules: Any = None, init_cfg: Any = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.ModuleDict.__init__(self, modules)
