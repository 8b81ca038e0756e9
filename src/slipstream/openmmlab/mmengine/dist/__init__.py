"""Process groups and collectives."""

from slipstream.dist import *  # noqa: F403
from slipstream.dist import __all__ as __all__
