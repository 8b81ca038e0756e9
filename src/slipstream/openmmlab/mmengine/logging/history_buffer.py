"""`HistoryBuffer`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.logging import HistoryBuffer

__all__ = ["HistoryBuffer"]
