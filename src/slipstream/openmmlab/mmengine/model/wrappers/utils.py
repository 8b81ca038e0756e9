"""`is_model_wrapper`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.model import is_model_wrapper

__all__ = ["is_model_wrapper"]
