"""Functions related to layers, worker processes and compiled operators."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from slipstream.openmmlab.mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm, _InstanceNorm
from slipstream.runner.environment import EnvOptions, MpOptions, setup_env

__all__ = ["has_batch_norm", "is_norm", "mmcv_full_available", "set_multi_processing"]


def set_multi_processing(
    mp_start_method: str = "fork", opencv_num_threads: int = 0, distributed: bool = False
) -> None:
    """Set the start method of worker processes, and the number of OpenCV threads."""
    setup_env("none", EnvOptions(mp_cfg=MpOptions(mp_start_method, opencv_num_threads)))  # type: ignore[arg-type]


def is_norm(layer: nn.Module, exclude: Any = None) -> bool:
    """Return whether `layer` is a batch, instance, group or layer norm and not an instance of a class in `exclude`."""
    if exclude is not None and isinstance(layer, exclude):
        return False
    return isinstance(layer, _BatchNorm | _InstanceNorm | nn.GroupNorm | nn.LayerNorm)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a module contains a batch norm layer."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def mmcv_full_available() -> bool:
    """Return whether mmcv is installed with its compiled operators."""
    try:
        importlib.import_module("mmcv._ext")
    except ImportError:
        return False
    return True
