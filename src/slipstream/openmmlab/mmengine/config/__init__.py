"""Configurations."""

from slipstream.config import DictAction
from slipstream.config.config_dict import ConfigDict
from slipstream.openmmlab.mmengine.config.config import Config, read_base

__all__ = ["Config", "ConfigDict", "DictAction", "read_base"]
