"""The constructor of optimizer wrappers for configurations of OpenMMLab's libraries."""

from __future__ import annotations

from torch import nn

from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.openmmlab.mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from slipstream.optim import DefaultOptimWrapperConstructor as OwnConstructor

__all__ = ["DefaultOptimWrapperConstructor"]


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor(OwnConstructor):
    """Slipstream's constructor, except that `custom_keys` that match no parameter are logged and not an error.

    Stock configurations contain such keys, for example for variants of a network.
    """

    def _check_custom_keys_match(self, model: nn.Module) -> None:
        try:
            super()._check_custom_keys_match(model)
        except ConfigError as error:
            print_log(f"paramwise_cfg.{error}", "current")
