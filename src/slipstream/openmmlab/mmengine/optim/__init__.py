"""Optimizer wrappers, parameter groups and schedulers."""

from slipstream.openmmlab.mmengine.optim.constructor import (
    DefaultOptimWrapperConstructor,
    build_optim_wrapper,
)
from slipstream.openmmlab.mmengine.optim.scheduler import *  # noqa: F403
from slipstream.openmmlab.mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from slipstream.optim import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    ZeroRedundancyOptimizer,
)

__all__ = [
    "OPTIMIZERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "AmpOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "OptimWrapper",
    "OptimWrapperDict",
    "ZeroRedundancyOptimizer",
    "build_optim_wrapper",
]
