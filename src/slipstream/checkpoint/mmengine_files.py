"""Read MMEngine's checkpoints without executing code from them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError

__all__ = ["convert_checkpoint", "is_from_mmengine", "safe_globals"]

_NUMPY_CLASSES = ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")


class _SavedHistory:
    """The contents of MMEngine's `HistoryBuffer`."""

    def __setstate__(self, state: Any) -> None:
        self.saved = dict(state) if isinstance(state, Mapping) else {}


def _statistic(owner: Any, name: str) -> None:
    """Replace `getattr` in the pickle of a `HistoryBuffer`, which stores references to its own methods."""
    if owner is not _SavedHistory:
        raise CheckpointError(
            f"the checkpoint reads an object's '{name}' attribute, which could execute code; use a different "
            "checkpoint"
        )


def safe_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the classes and functions that MMEngine's checkpoints refer to, with their names in the files."""
    # These functions are in a private module whose name depends on the NumPy version.
    scalar: Any = np.float64(0).__reduce__()[0]
    reconstruct: Any = np.zeros(0).__reduce__()[0]
    return [
        (_SavedHistory, "mmengine.logging.history_buffer.HistoryBuffer"),
        (_statistic, "builtins.getattr"),
        (collections.Counter, "collections.Counter"),
        (np.ndarray, "numpy.ndarray"),
        (np.dtype, "numpy.dtype"),
        *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *((type(np.dtype(name)), f"numpy.dtypes.{type(np.dtype(name)).__name__}") for name in _NUMPY_CLASSES),
    ]


def is_from_mmengine(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether MMEngine wrote the checkpoint."""
    meta = checkpoint.get("meta")
    return isinstance(meta, Mapping) and "mmengine_version" in meta


def convert_checkpoint(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return an MMEngine checkpoint with its message hub and `meta` converted, so that Slipstream can resume from it.

    NumPy numbers become built-in numbers. Only the newest values of each scalar history are kept. `path`, the
    path of the checkpoint, is used only in messages.

    Raises:
        CheckpointError: the message hub is damaged.
    """
    hub = checkpoint.get("message_hub")
    if isinstance(hub, Mapping):
        histories = {key: _history(value) for key, value in _entries(hub, "log_scalars", path).items()}
        infos = {key: _builtin(value) for key, value in _entries(hub, "runtime_info", path).items()}
        infos = {key: value for key, value in infos.items() if key not in ("cfg", "last_ckpt")}
        checkpoint["message_hub"] = {
            "log_scalars": {key: history for key, history in histories.items() if history},
            "runtime_info": {k: v for k, v in infos.items() if isinstance(v, bool | int | float | str)},
        }
    checkpoint["meta"] = {key: _builtin(value) for key, value in checkpoint["meta"].items()}
    return checkpoint


def _entries(hub: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    entries = hub.get(key, {})
    if not isinstance(entries, Mapping):
        raise CheckpointError(
            f"{path} is damaged: message_hub.{key} must be a dict, not {type(entries).__name__}; use a different "
            "checkpoint, or remove 'message_hub' from this one"
        )
    return entries


def _history(value: Any) -> dict[str, Any]:
    """Return the newest entries of a history, or an empty dict if it has an unknown format."""
    saved: Any = getattr(value, "saved", {})
    values, counts = saved.get("_log_history"), saved.get("_count_history")
    if not (_is_numeric(values) and _is_numeric(counts) and len(values) == len(counts) > 0):
        return {}
    newest = values[-1000:].tolist(), counts[-1000:].tolist()
    return {"log_history": newest[0], "count_history": newest[1], "max_length": 10_000}


def _is_numeric(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iuf"


def _builtin(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
