"""Write scalars, configurations and images to files and tracking services."""

from slipstream.visualization.backends import (
    BaseVisBackend,
    LocalVisBackend,
    TensorboardVisBackend,
    default_backends,
)
from slipstream.visualization.segmentation import colorize, contact_sheet, overlay
from slipstream.visualization.trackers import MLflowVisBackend, TrackioVisBackend, WandbVisBackend
from slipstream.visualization.visualizer import Visualizer

__all__ = [
    "BaseVisBackend", "LocalVisBackend", "MLflowVisBackend", "TensorboardVisBackend",
    "TrackioVisBackend", "Visualizer", "WandbVisBackend", "colorize", "contact_sheet", "default_backends", "overlay",
]  # fmt: skip
