"""One logger per Runner: coloured lines on a terminal, plain ones elsewhere, everything to a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MMLogger", "build_logger", "print_log"]

_FORMAT = "%(asctime)s - %(levelname)s - %(message)s"
_DATE_FORMAT = "%Y/%m/%d %H:%M:%S"
_DATE_LENGTH = len("2000/01/01 00:00:00")
_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}

# The loggers of this context (thread or task) by name, the current one last.
_loggers: ContextVar[Mapping[str, MMLogger]] = ContextVar("slipstream_loggers", default=MappingProxyType({}))


class MMLogger(logging.Logger):
    """A logger that belongs to one Runner; made by `build_logger`.

    It stands outside Python's tree of loggers, so that two Runners in one process share no handler.

    Attributes:
        console: the rich Console its lines go to; a `ProgressBar` on it stays below them.
        rank: the process's rank; others than 0 send only errors to the console.
    """

    def __init__(self, name: str, console: Console, rank: int = 0) -> None:
        super().__init__(name, logging.DEBUG)
        self.console = console
        self.rank = rank

    def __reduce__(self) -> tuple[Callable[..., MMLogger], tuple[Any, ...]]:
        # A module or data set may hold a logger and be copied or sent to a worker; the copy has no file.
        return build_logger, (self.name, None, self.handlers[0].level, self.rank)

    def close(self) -> None:
        """Close the log file; a later line opens it again."""
        for handler in self.handlers:
            handler.close()

    @contextmanager
    def as_current(self) -> Iterator[MMLogger]:
        """Make this the logger that `get_current_instance` returns inside the `with` block."""
        token = _loggers.set(self._in_front())
        try:
            yield self
        finally:
            _loggers.reset(token)

    def _in_front(self) -> Mapping[str, MMLogger]:
        others = {name: logger for name, logger in _loggers.get().items() if name != self.name}
        return {**others, self.name: self}

    @classmethod
    def get_instance(
        cls, name: str, log_file: str | Path | None = None, log_level: int | str = "INFO"
    ) -> MMLogger:
        """Return this context's logger called `name`, made by `build_logger` at the first call."""
        if name not in _loggers.get():
            _loggers.set(build_logger(name, log_file, log_level)._in_front())
        return _loggers.get()[name]

    @classmethod
    def get_current_instance(cls) -> MMLogger:
        """Return the logger of the Runner that runs in this context, or else one that prints to stderr."""
        for logger in reversed(list(_loggers.get().values())):
            return logger
        return _on_console("slipstream", _console(stderr=True), logging.INFO)


class _ConsoleHandler(logging.Handler):
    """Writes records to a rich Console, above the progress bar if one is shown."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self.console = console
        self.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self.console.is_terminal:
                self._print_coloured(line, record.levelname)
            else:  # rich would break the line at 80 columns
                self.console.file.write(line + "\n")
                self.console.file.flush()
        except Exception:
            self.handleError(record)

    def _print_coloured(self, line: str, level_name: str) -> None:
        from rich.text import Text

        text = Text(line)
        text.stylize("dim", 0, _DATE_LENGTH)
        level_start = _DATE_LENGTH + len(" - ")
        text.stylize(_STYLES.get(level_name, ""), level_start, level_start + len(level_name))
        self.console.print(text, soft_wrap=True)


def build_logger(
    name: str,
    log_file: str | Path | None = None,
    level: int | str = "INFO",
    rank: int = 0,
) -> MMLogger:
    """Return a new logger that shares nothing with any other.

    Args:
        name: of the run; shown nowhere, but `MMLogger.get_instance(name)` finds the logger by it.
        log_file: gets every line, whatever its level; its folder is made.
        level: the least level shown on the console of rank 0; the other ranks show errors only.
        rank: of this process.

    Raises:
        ConfigError: `level` is not a level of Python's `logging`.
    """
    shown = _level_number(level)
    logger = _on_console(name, _console(), shown if rank == 0 else max(shown, logging.ERROR), rank)
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        file_handler = logging.FileHandler(log_file, encoding="utf-8")
        file_handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        logger.addHandler(file_handler)
    return logger


def print_log(msg: object, logger: logging.Logger | str | None = None, level: int = logging.INFO) -> None:
    """Log `msg` where `logger` says.

    Args:
        msg: the message.
        logger: a Logger; `"current"`, the running Runner's; the name of one of this context's loggers;
            `"silent"`, nowhere; None, `print`.
        level: the level of the message.

    Raises:
        UnknownNameError: this context has no logger of that name.
        ConfigError: `logger` is something else.
    """
    if logger is None:
        print(msg)
    elif isinstance(logger, logging.Logger):
        logger.log(level, msg)
    elif logger == "current":
        MMLogger.get_current_instance().log(level, msg)
    elif not isinstance(logger, str):
        raise ConfigError(f"logger must be a Logger, a name or None, not {type(logger).__name__}")
    elif logger != "silent":
        _named(logger).log(level, msg)


def _named(name: str) -> MMLogger:
    known = _loggers.get()
    if name not in known:
        hint = did_you_mean(name, known)
        raise UnknownNameError(
            f"no logger is called '{name}'{hint}; make it with MMLogger.get_instance('{name}')"
        )
    return known[name]


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _on_console(name: str, console: Console, level: int, rank: int = 0) -> MMLogger:
    logger = MMLogger(name, console, rank)
    logger.addHandler(_ConsoleHandler(console, level))
    return logger


def _level_number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        hint = did_you_mean(level, levels)
        raise ConfigError(f"'{level}' is not a level{hint}; levels are {', '.join(levels)}", "log_level")
    return levels[level.upper()]
