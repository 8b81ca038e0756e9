"""Package names, and errors raised by Python-style configurations."""

from slipstream.openmmlab.mmengine.config.lazy import ConfigParsingError
from slipstream.openmmlab.mmengine.config.packages import MODULE2PACKAGE

__all__ = ["MODULE2PACKAGE", "ConfigParsingError"]
