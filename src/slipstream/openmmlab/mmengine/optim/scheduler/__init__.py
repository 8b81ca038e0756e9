"""Parameter schedulers."""

from slipstream.optim.scheduler import *  # noqa: F403
from slipstream.optim.scheduler import __all__ as __all__
