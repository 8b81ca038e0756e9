"""Loggers and the message hub."""

from slipstream.logging import HistoryBuffer, MessageHub, MMLogger, print_log

__all__ = ["HistoryBuffer", "MMLogger", "MessageHub", "print_log"]
