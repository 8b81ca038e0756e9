"""One logger per Runner, which writes to the console (in color on a terminal) and to a log file."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.logging.instances import Named, instances_by_name

if TYPE_CHECKING:
    from rich.console import Console

# Start of the last record in the log file of a run that ended with an error.
RUN_FAILED = "The run failed: "

_FORMAT = "%(asctime)s - %(levelname)s - %(message)s"
_DATE_FORMAT = "%Y/%m/%d %H:%M:%S"
_DATE_LENGTH = len("2000/01/01 00:00:00")
_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


class MMLogger(Named, logging.Logger):
    """The logger of one Runner, created by `build_logger`.

    The logger is not part of Python's logger hierarchy, so two Runners in one process do not share handlers.

    Attributes:
        console: the rich Console that prints the log lines; a `ProgressBar` on this console stays below them.
        rank: the rank of this process; ranks other than 0 print only errors to the console.
    """

    instances = instances_by_name("slipstream_loggers")

    def __init__(self, name: str, console: Console, rank: int = 0) -> None:
        super().__init__(name, logging.DEBUG)
        self.console = console
        self.rank = rank

    def __reduce__(self) -> tuple[Callable[..., MMLogger], tuple[Any, ...]]:
        # Modules and datasets with a logger may be copied or sent to worker processes. A copied logger has no log file.
        return build_logger, (self.name, None, self.handlers[0].level, self.rank)

    def close(self) -> None:
        """Close the log file. Logging another message reopens the file."""
        for handler in self.handlers:
            handler.close()

    @classmethod
    def get_instance(
        cls, name: str, log_file: str | Path | None = None, log_level: int | str = "INFO"
    ) -> MMLogger:
        """Return this context's logger `name`; the first call creates it with `build_logger`."""
        if name not in cls.instances.get():
            build_logger(name, log_file, log_level).make_current()
        return cls.instances.get()[name]

    @classmethod
    def get_current_instance(cls) -> MMLogger:
        """Return the logger of the active Runner in this context, or else a logger that prints to stderr."""
        for logger in reversed(list(cls.instances.get().values())):
            return logger
        return _console_logger("slipstream", _console(stderr=True), logging.INFO)


class _ConsoleHandler(logging.Handler):
    """Write records to a rich Console, above the progress bar if there is one."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self.console = console
        self.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self.console.is_terminal:
                self._print_colored(line, record.levelname)
            else:  # rich would wrap the line at 80 columns
                self.console.file.write(line + "\n")
                self.console.file.flush()
        except BrokenPipeError:
            pass  # the program that reads the output has ended; the log file contains all records
        except Exception:
            self.handleError(record)

    def _print_colored(self, line: str, level_name: str) -> None:
        from rich.text import Text

        text = Text(line)
        text.stylize("dim", 0, _DATE_LENGTH)
        level_start = _DATE_LENGTH + len(" - ")
        text.stylize(_STYLES.get(level_name, ""), level_start, level_start + len(level_name))
        self.console.print(text, soft_wrap=True)


class _FileHandler(logging.FileHandler):
    """Write records to the log file. A write error is reported once and does not stop the run."""

    def __init__(self, path: str | Path, console: Console) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        self._console, self._reported = console, False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            self._console.file.write(f"The log file {self.baseFilename} cannot be written: {error}\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # reported by `handleError`
            super().close()


def build_logger(
    name: str,
    log_file: str | Path | None = None,
    level: int | str = "INFO",
    rank: int = 0,
) -> MMLogger:
    """Return a new logger that shares no state with other loggers.

    Args:
        name: name of the run, used by `MMLogger.get_instance(name)`; not printed.
        log_file: file to which messages of all levels are written; its folder is created if it does not exist.
        level: minimum level printed to the console of rank 0; other ranks print only errors.
        rank: rank of this process.

    Raises:
        ConfigError: if `level` is not a log level in Python's `logging` module.
    """
    console_level = _level_number(level)
    logger = _console_logger(
        name, _console(), console_level if rank == 0 else max(console_level, logging.ERROR), rank
    )
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        logger.addHandler(_FileHandler(log_file, logger.console))
    return logger


def print_log(msg: object, logger: logging.Logger | str | None = None, level: int = logging.INFO) -> None:
    """Log `msg` with `logger`.

    Args:
        msg: the message.
        logger: a Logger, the name of a logger in this context, `"current"` (the active Runner's logger),
            `"silent"` (discard the message), or None (call `print`).
        level: the level of the message.

    Raises:
        UnknownNameError: if this context has no logger with that name.
        ConfigError: if `logger` has a different type.
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
        known = MMLogger.instances.get()
        if logger not in known:
            raise UnknownNameError(
                f"unknown logger '{logger}'; create it with MMLogger.get_instance('{logger}')"
            )
        known[logger].log(level, msg)


def _console(stderr: bool = False) -> Console:
    from slipstream.tables import make_console

    return make_console(stderr)


def _console_logger(name: str, console: Console, level: int, rank: int = 0) -> MMLogger:
    logger = MMLogger(name, console, rank)
    logger.addHandler(_ConsoleHandler(console, level))
    return logger


def _level_number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ConfigError(f"'{level}' is not a log level{did_you_mean(level, levels)}", "log_level")
    return levels[level.upper()]
