"""Optimizer wrappers, parameter groups and schedulers."""

from slipstream.openmmlab.mmengine.optim.constructor import DefaultOptimWrapperConstructor
from slipstream.optim import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    ZeroRedundancyOptimizer,
    build_optim_wrapper,
)
from slipstream.optim.scheduler import *  # noqa: F403

__all__ = [
    "AmpOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "OptimWrapper",
    "OptimWrapperDict",
    "ZeroRedundancyOptimizer",
    "build_optim_wrapper",
]
