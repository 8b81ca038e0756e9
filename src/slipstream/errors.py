"""Exceptions raised by Slipstream.

All of them derive from `SlipstreamError`. Where users expect `ValueError`, `TypeError` or `KeyError`, the class
also derives from that exception.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = [
    "BuildError", "CheckpointError", "ConfigError", "DataError", "DataLoaderError", "DistributedError",
    "LossError", "MissingPackageError", "ModelError", "NonFiniteLossError", "SlipstreamError",
    "UnknownNameError", "did_you_mean", "explained", "locate",
]  # fmt: skip


class SlipstreamError(Exception):
    """Base class for all exceptions raised by Slipstream."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # torch re-raises a data loader worker's exception with the worker's full traceback as the message.
        name, text = type(self).__name__, str(args[0]) if args else ""
        if text.startswith(f"Caught {name} in "):
            lines = re.split(rf"^(?:\S+\.)?{name}: ", text, flags=re.MULTILINE)[-1].strip().splitlines()
            # The traceback ends with the notes, which Slipstream writes in parentheses.
            while len(lines) > 1 and lines[-1].startswith("(") and lines[-1].endswith(")"):
                self.add_note(lines.pop())
            self.args = ("\n".join(lines),)
            self.__cause__ = Exception(text)

    def __str__(self) -> str:
        # KeyError.__str__ returns the repr of the message.
        return " ".join(str(arg) for arg in self.args)


class ConfigError(SlipstreamError, ValueError):
    """A configuration key or value is invalid; `path` is its location, such as `optim_wrapper.optimizer`.

    `source` is the dict in the user's configuration to which the path is relative, if it is known.
    """

    source: Any = None

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}" if self.path else str(self.args[0])


class BackendError(SlipstreamError, RuntimeError):
    """A visualization backend, such as a tracking service, failed."""


class UnknownNameError(ConfigError, KeyError):
    """A class, recipe or key name is unknown."""


class BuildError(ConfigError, TypeError):
    """An object could not be built from its configuration."""


class DataError(SlipstreamError, ValueError):
    """A dataset, sample or batch has an unexpected type or shape, or invalid contents."""


class ModelError(SlipstreamError, ValueError):
    """A model does not meet the requirements for training."""


class MissingPackageError(SlipstreamError, ModuleNotFoundError):
    """An optional package is required but not installed."""


class LossError(SlipstreamError, TypeError, ValueError):
    """A training step returned something that is not a scalar loss."""


class NonFiniteLossError(SlipstreamError, FloatingPointError):
    """A loss, a weight or a running statistic became NaN or infinite.

    `iteration` is the number (counted from 1) of the first step in which this happened, or None if it is unknown.
    """

    def __init__(self, message: str, iteration: int | None = None) -> None:
        super().__init__(message)
        self.iteration = iteration


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint cannot be read or written, or belongs to a different model."""


class DataLoaderError(SlipstreamError, RuntimeError):
    """A worker process of a data loader died, timed out, or ran out of shared memory."""


class DistributedError(SlipstreamError, RuntimeError):
    """The process group cannot be set up or used."""


@contextmanager
def explained(kind: type[SlipstreamError], message: Callable[[str], str]) -> Iterator[None]:
    """Raise a `kind` in place of any other error inside the `with` block.

    Args:
        kind: class of the error.
        message: returns the message, given the class and the text of the other error.
    """
    try:
        yield
    except kind:
        raise
    except Exception as error:
        raise kind(message(f"{type(error).__name__}: {error}")) from error


# Hints for names that belong to other libraries, by the end of their path.
_HINTS = {
    "ema.momentum": "it is an argument of EMAHook and equals 1 - decay; use decay",
    "speed.accumulate_grad_batches": "use 'accumulate'",
    "speed.gradient_accumulation_steps": "use 'accumulate'",
    "speed.gradient_clip_val": "use 'clip_grad'",
    "speed.max_grad_norm": "use 'clip_grad'",
    "speed.mixed_precision": "use 'precision'",
    "speed.torch_compile": "use 'compile'",
}


def did_you_mean(name: str, candidates: Iterable[str], path: str = "") -> str:
    """Return a hint for an unknown name: what replaces it, or the closest name; an empty string if there is neither.

    Args:
        name: the unknown name.
        candidates: the known names.
        path: config path of the unknown name, including the name. The default is the name itself.
    """
    for unknown, hint in _HINTS.items():
        if f".{path or name}".endswith(f".{unknown}"):
            return f"; {hint}"
    by_lower = {str(c).lower(): c for c in candidates}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""


def locate(target: Any, tree: Any) -> str | None:
    """Return the dotted path of the object `target` (by identity) in nested dicts and lists; None if it is absent."""
    if target is tree:
        return ""
    items: Any = ()
    if isinstance(tree, Mapping):
        items = ((f".{key}", value) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        items = ((f"[{index}]", value) for index, value in enumerate(tree))
    for key, value in items:
        if (rest := locate(target, value)) is not None:
            return str(key) + rest
    return None
