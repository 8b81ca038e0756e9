"""`set_multi_processing`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.utils.dl_utils import set_multi_processing

__all__ = ["set_multi_processing"]
