"""PyTorch utilities."""

from slipstream.openmmlab.mmengine.utils.dl_utils.collect_env import collect_env
from slipstream.openmmlab.mmengine.utils.dl_utils.misc import (
    has_batch_norm,
    is_norm,
    mmcv_full_available,
    set_multi_processing,
)
from slipstream.openmmlab.mmengine.utils.dl_utils.parrots_wrapper import TORCH_VERSION

__all__ = [
    "TORCH_VERSION",
    "collect_env",
    "has_batch_norm",
    "is_norm",
    "mmcv_full_available",
    "set_multi_processing",
]
