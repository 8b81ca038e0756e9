"""Load configuration files and their bases, apply overrides, and build typed options.

Only `.py` configuration files are executed. YAML, JSON, TOML and overrides are parsed as data.
"""

from slipstream.config.config import Config, config_text
from slipstream.config.config_dict import ConfigDict
from slipstream.config.options import add_config_path, options, read_value
from slipstream.config.override import DictAction, parse_override

__all__ = [
    "Config", "ConfigDict", "DictAction", "add_config_path", "config_text", "options", "parse_override", "read_value",
]  # fmt: skip
