"""Functions that build objects from configurations, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.registry import (
    build_from_cfg,
    build_model_from_cfg,
    build_runner_from_cfg,
    build_scheduler_from_cfg,
)

__all__ = ["build_from_cfg", "build_model_from_cfg", "build_runner_from_cfg", "build_scheduler_from_cfg"]
