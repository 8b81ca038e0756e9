"""`MMDistributedDataParallel`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.model import MMDistributedDataParallel

__all__ = ["MMDistributedDataParallel"]
