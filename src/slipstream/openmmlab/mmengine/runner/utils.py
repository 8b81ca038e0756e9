"""`set_random_seed`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.runner import set_random_seed

__all__ = ["set_random_seed"]
