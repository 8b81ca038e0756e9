"""Optimizer wrappers, parameter groups and schedulers."""

from slipstream.optim import npu as npu  # registers the NpuFused* names
from slipstream.optim.amp_optim_wrapper import AmpOptimWrapper
from slipstream.optim.constructor import DefaultOptimWrapperConstructor, build_optim_wrapper
from slipstream.optim.library import BertAdam, RMSpropTF
from slipstream.optim.optim_wrapper import GradClip, OptimWrapper, OptimWrapperDict
from slipstream.optim.scheduler import *  # noqa: F403
from slipstream.optim.zero import ZeroRedundancyOptimizer

__all__ = [
    "AmpOptimWrapper", "BertAdam", "DefaultOptimWrapperConstructor", "GradClip", "OptimWrapper",
    "OptimWrapperDict", "RMSpropTF", "ZeroRedundancyOptimizer", "build_optim_wrapper",
]  # fmt: skip
