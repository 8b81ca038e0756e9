"""Visualization backends, re-exported under MMEngine's module path."""

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
    "WandbVisBackend",
]
