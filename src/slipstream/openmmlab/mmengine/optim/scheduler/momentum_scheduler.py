"""Parameter schedulers."""

from slipstream.optim.scheduler.momentum_scheduler import *  # noqa: F403
from slipstream.optim.scheduler.momentum_scheduler import __all__ as __all__
