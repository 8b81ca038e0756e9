"""Optimizer wrappers, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIMIZERS,
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    ZeroRedundancyOptimizer,
    build_optim_wrapper,
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
