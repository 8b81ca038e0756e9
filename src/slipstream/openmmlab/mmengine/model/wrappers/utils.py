"""Wrappers for distributed training, at MMEngine's module path."""

from slipstream.openmmlab.mmengine.model import is_model_wrapper

__all__ = ["is_model_wrapper"]
