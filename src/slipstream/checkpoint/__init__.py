"""Save and load checkpoints, weights and random state."""

from slipstream.checkpoint import matching, random_state, remote, search, sharded, weights
from slipstream.checkpoint.background import BackgroundWriter
from slipstream.checkpoint.files import remove_checkpoint, save_checkpoint, stored_config
from slipstream.checkpoint.matching import *  # noqa: F403
from slipstream.checkpoint.random_state import *  # noqa: F403
from slipstream.checkpoint.remote import *  # noqa: F403
from slipstream.checkpoint.search import *  # noqa: F403
from slipstream.checkpoint.sharded import *  # noqa: F403
from slipstream.checkpoint.weights import *  # noqa: F403

__all__ = ["BackgroundWriter", "remove_checkpoint", "save_checkpoint", "stored_config"]
__all__ += matching.__all__
__all__ += random_state.__all__
__all__ += remote.__all__
__all__ += search.__all__
__all__ += sharded.__all__
__all__ += weights.__all__
