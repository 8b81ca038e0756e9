"""Image visualization, and the backends that store images."""

from slipstream.openmmlab.mmengine.visualization.visualizer import Visualizer
from slipstream.visualization import (
    BaseVisBackend,
    LocalVisBackend,
    MLflowVisBackend,
    TensorboardVisBackend,
    WandbVisBackend,
)

__all__ = [
    "BaseVisBackend",
    "LocalVisBackend",
    "MLflowVisBackend",
    "TensorboardVisBackend",
    "Visualizer",
    "WandbVisBackend",
]
