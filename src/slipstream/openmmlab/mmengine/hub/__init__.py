"""Configurations and models from installed libraries."""

from slipstream.openmmlab.mmengine.hub.hub import get_config, get_model

__all__ = ["get_config", "get_model"]
