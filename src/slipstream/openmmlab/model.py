"""Base classes for models, data preprocessors and wrappers, with MMEngine's semantics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmengine.model.base_model import _original_data_preprocessor as original
from mmengine.model.weight_init import initialize
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

import slipstream.model.base_module as own
from slipstream.model import MMDistributedDataParallel, MMSeparateDistributedDataParallel
from slipstream.model import is_model_wrapper as is_own_wrapper
from slipstream.model.base_model import BaseModel as OwnModel
from slipstream.model.base_model import run_forward
from slipstream.model.data_preprocessor import BaseDataPreprocessor as OwnPreprocessor
from slipstream.model.wrappers import MMFullyShardedDataParallel
from slipstream.openmmlab.registry import MODEL_WRAPPERS, MODELS
from slipstream.registry import Registry
from slipstream.step import sum_losses

__all__ = [
    "BaseDataPreprocessor", "BaseModel", "BaseModule", "ImgDataPreprocessor", "MMDistributedDataParallel",
    "MMFullyShardedDataParallel", "MMSeparateDistributedDataParallel", "ModuleDict", "ModuleList",
    "Sequential", "is_model_wrapper",
]  # fmt: skip


class BaseModule(own.BaseModule):
    """Slipstream's `BaseModule` with MMEngine's initializers, which ignore layers that `init_cfg` does not name."""

    def _initialize(self, cfgs: list[Mapping[str, Any]]) -> None:
        initialize(self, [dict(cfg) for cfg in cfgs])


@MODELS.register_module()
class Sequential(BaseModule, own.Sequential):
    """`nn.Sequential` with an `init_cfg`."""


@MODELS.register_module()
class ModuleList(BaseModule, own.ModuleList):
    """`nn.ModuleList` with an `init_cfg`."""


@MODELS.register_module()
class ModuleDict(BaseModule, own.ModuleDict):
    """`nn.ModuleDict` with an `init_cfg`."""


class BaseModel(BaseModule, OwnModel):
    """Slipstream's `BaseModel`, except that losses may have any shape and are averaged."""

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the means of all losses, and the values to log."""
        return sum_losses({name: _mean(value) for name, value in losses.items()})

    def _run_forward(self, data: Any, mode: str) -> Any:
        return run_forward(self, data, mode)


def _mean(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.mean()
    return [_mean(item) for item in value] if isinstance(value, list | tuple) else value


@MODELS.register_module(force=True)
class BaseDataPreprocessor(OwnPreprocessor):
    """Move a batch (nested dicts and sequences of tensors and data elements) to the module's device.

    Args:
        non_blocking: copy from pinned memory asynchronously.
    """

    def __init__(self, non_blocking: bool | None = False) -> None:
        super().__init__(bool(non_blocking))

    def cast_data(self, data: Any) -> Any:
        """Move all tensors to the device, and make the tensors of data elements contiguous.

        A compiled step is specialized to the strides of its inputs, and transforms such as flips change the strides.
        """
        moved = super().cast_data(data)
        return _contiguous(moved) if isinstance(moved, BaseDataElement) else moved

    @property
    def _non_blocking(self) -> bool:
        return self.non_blocking

    @_non_blocking.setter
    def _non_blocking(self, value: bool | None) -> None:
        self.non_blocking = bool(value)


@MODELS.register_module(force=True)
class ImgDataPreprocessor(BaseDataPreprocessor, original.ImgDataPreprocessor):
    """MMEngine's `ImgDataPreprocessor`, which normalizes, pads and stacks images.

    The base class of this package moves the batch to the device.
    """

    __init__ = original.ImgDataPreprocessor.__init__
    forward = original.ImgDataPreprocessor.forward


def _contiguous(value: Any) -> Any:
    """Make a tensor (or a data element's tensors) contiguous, with default strides even for dimensions of size 1."""
    if isinstance(value, BaseDataElement):
        new = value.new()
        new.set_data({name: _contiguous(item) for name, item in value.items()})
        return new
    if type(value) is not Tensor or value.layout is not torch.strided:
        return value
    strides = [1]
    for size in reversed(value.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return value.contiguous().as_strided(value.shape, strides[: value.dim()])


def is_model_wrapper(model: nn.Module, registry: Registry = MODEL_WRAPPERS) -> bool:
    """Return whether a module is an instance of a wrapper that is registered in `registry` or its children.

    The default is MMEngine's registry, which also contains the wrappers from torch and Slipstream.
    """
    if registry is MODEL_WRAPPERS and is_own_wrapper(model):
        return True
    if isinstance(model, tuple(registry.module_dict.values())):
        return True
    return any(is_model_wrapper(model, child) for child in registry.children.values())
