"""Package names, and the error raised for unsupported code in pure Python style configurations."""

from slipstream.openmmlab.mmengine.config.lazy import ConfigParsingError
from slipstream.openmmlab.mmengine.config.packages import MODULE2PACKAGE

__all__ = ["MODULE2PACKAGE", "ConfigParsingError"]
