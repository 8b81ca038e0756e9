"""`MMLogger` and `print_log`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.logging import MMLogger, print_log

__all__ = ["MMLogger", "print_log"]
