"""Wrappers for distributed training."""

from slipstream.model.wrappers import distributed, fully_sharded
from slipstream.model.wrappers.distributed import *  # noqa: F403
from slipstream.model.wrappers.fully_sharded import *  # noqa: F403

__all__ = [*distributed.__all__, *fully_sharded.__all__]
