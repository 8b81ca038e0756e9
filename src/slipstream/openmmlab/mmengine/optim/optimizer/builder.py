"""`build_optim_wrapper`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import build_optim_wrapper

__all__ = ["build_optim_wrapper"]
