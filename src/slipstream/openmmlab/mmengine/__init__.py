"""Slipstream's versions of MMEngine modules; `import slipstream.openmmlab` makes `mmengine` refer to this package."""

from slipstream.openmmlab.mmengine.config import Config, ConfigDict, DictAction, read_base
from slipstream.openmmlab.mmengine.fileio import *  # noqa: F403
from slipstream.openmmlab.mmengine.logging import HistoryBuffer, MessageHub, MMLogger, print_log
from slipstream.openmmlab.mmengine.registry import *  # noqa: F403
from slipstream.openmmlab.mmengine.utils import *  # noqa: F403
from slipstream.openmmlab.mmengine.version import __version__, version_info

__all__ = [
    "Config",
    "ConfigDict",
    "DictAction",
    "HistoryBuffer",
    "MMLogger",
    "MessageHub",
    "__version__",
    "print_log",
    "read_base",
    "version_info",
]
