"""The errors that Slipstream raises: each names the thing, its place and the remedy.

All derive from `SlipstreamError`; where Python users expect `ValueError`, `TypeError` or `KeyError`
semantics, the class derives from those too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "BuildError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "LossError",
    "MissingPackageError",
    "ModelError",
    "NonFiniteLossError",
    "SlipstreamError",
    "UnknownNameError",
    "did_you_mean",
]


class SlipstreamError(Exception):
    """Base class of every error raised by Slipstream on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # torch raises the error of a loader's worker anew, with the text of its whole traceback for a message.
        name, text = type(self).__name__, str(args[0]) if args else ""
        if text.startswith(f"Caught {name} in "):
            self.args = (re.split(rf"^(?:\S+\.)?{name}: ", text, flags=re.MULTILINE)[-1].strip(),)
            self.__cause__ = Exception(text)

    def __str__(self) -> str:
        # KeyError among the bases would print the repr of the message.
        return " ".join(str(arg) for arg in self.args)


class ConfigError(SlipstreamError, ValueError):
    """A configuration key or value is wrong; `path` says where it stands (`optim_wrapper.optimizer`)."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}" if self.path else str(self.args[0])


class UnknownNameError(ConfigError, KeyError):
    """A name (of a class, recipe or key) that nobody registered."""


class BuildError(ConfigError, TypeError):
    """A part could not be built from its configuration."""


class DataError(SlipstreamError, ValueError):
    """A data set, sample or batch is not what the engine or the model expects."""


class ModelError(SlipstreamError, ValueError):
    """A model cannot be trained as it is."""


class MissingPackageError(SlipstreamError, ModuleNotFoundError):
    """An optional package is needed and not installed."""


class LossError(SlipstreamError, TypeError, ValueError):
    """A training step returned something that is not a scalar loss."""


class NonFiniteLossError(SlipstreamError, FloatingPointError):
    """A loss became NaN or infinite."""


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint cannot be read, or belongs to another model."""


class DistributedError(SlipstreamError, RuntimeError):
    """The process group cannot be set up or used."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the candidate nearest to `name`, or an empty string."""
    by_lower = {c.lower(): c for c in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""
