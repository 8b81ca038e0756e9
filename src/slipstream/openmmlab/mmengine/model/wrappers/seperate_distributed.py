"""`MMSeparateDistributedDataParallel`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.model import MMSeparateDistributedDataParallel

__all__ = ["MMSeparateDistributedDataParallel"]
