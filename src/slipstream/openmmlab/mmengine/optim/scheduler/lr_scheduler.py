"""Parameter schedulers."""

from slipstream.optim.scheduler.lr_scheduler import *  # noqa: F403
from slipstream.optim.scheduler.lr_scheduler import __all__ as __all__
