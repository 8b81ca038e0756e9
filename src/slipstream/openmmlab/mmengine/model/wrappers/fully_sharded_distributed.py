"""`MMFullyShardedDataParallel`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.model import MMFullyShardedDataParallel

__all__ = ["MMFullyShardedDataParallel"]
