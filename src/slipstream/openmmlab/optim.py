"""Optimizer wrappers, and parameter groups with MMEngine's structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.openmmlab.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from slipstream.openmmlab.schedulers import *  # noqa: F403
from slipstream.openmmlab.schedulers import __all__ as _schedulers
from slipstream.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict, ZeroRedundancyOptimizer
from slipstream.optim import DefaultOptimWrapperConstructor as OwnConstructor
from slipstream.optim import build_optim_wrapper as build_own
from slipstream.registry import default_scope
from slipstream.registry.registry import current_scope

__all__ = [
    "OPTIMIZERS", "OPTIM_WRAPPER_CONSTRUCTORS", "AmpOptimWrapper", "DefaultOptimWrapperConstructor",
    "OptimWrapper", "OptimWrapperDict", "ZeroRedundancyOptimizer", "build_optim_wrapper",
]  # fmt: skip
__all__ += _schedulers


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor(OwnConstructor):
    """Slipstream's constructor with MMEngine's parameter groups, so that optimizer states have MMEngine's structure.

    With `paramwise_cfg`, each trainable parameter has its own group. Without it, a single group contains all
    parameters, including frozen ones. A group contains the settings of the custom key that applies to its parameter.

    A custom key that does not match any parameter causes a log message instead of an error, because stock
    configurations contain such keys, for example for other variants of a network.
    """

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        groups = super()._groups(model)
        return groups if self.paramwise_cfg else [{"params": list(model.parameters())}]

    def _merge(self, params: list[dict[str, Any]], names: dict[int, str]) -> list[dict[str, Any]]:
        if not self.paramwise_cfg:
            return super()._merge(params, names)
        super()._merge(params, names)  # raises an error for repeated parameters
        groups: list[dict[str, Any]] = []
        seen: set[int] = set()
        for group in params:
            new = [p for p in group["params"] if p.requires_grad and id(p) not in seen]
            seen.update(map(id, new))
            groups += [{**group, "params": new}] if new else []
        return groups

    def _custom_options(self, name: str) -> dict[str, Any] | None:
        options = super()._custom_options(name)
        if options is None:
            return None
        keys = self.paramwise.custom_keys
        key = min((k for k in keys if k in name), key=lambda k: (-len(k), k))
        bases = {"lr": self.base_lr, "weight_decay": self.base_wd}
        return {**{k: v for k, v in bases.items() if v is not None}, **options, **keys[key]}

    def _check_custom_keys_match(self, model: nn.Module) -> None:
        try:
            super()._check_custom_keys_match(model)
        except ConfigError as error:
            print_log(str(error), "current")


def build_optim_wrapper(model: nn.Module, cfg: Mapping[str, Any]) -> OptimWrapper:
    """Build the optimizer wrapper for `model`, by default with MMEngine's parameter groups.

    Args:
        model: a model, optionally wrapped for data parallelism.
        cfg: see `slipstream.optim.build_optim_wrapper`.
    """
    with default_scope(current_scope() or "mmengine"):
        return build_own(model, cfg)
