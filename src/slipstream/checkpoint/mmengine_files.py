"""Read MMEngine's checkpoints without executing code from them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError

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


def convert_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return an MMEngine checkpoint with its message hub and `meta` converted, so that Slipstream can resume from it.

    NumPy numbers become built-in numbers. Only the newest values of each scalar history are kept.
    """
    hub = checkpoint.get("message_hub")
    if isinstance(hub, Mapping):
        histories = {key: _history(value) for key, value in hub.get("log_scalars", {}).items()}
        infos = {key: _builtin(value) for key, value in hub.get("runtime_info", {}).items()}
        checkpoint["message_hub"] = {
            "log_scalars": {key: history for key, history in histories.items() if history},
            "runtime_info": {
                key: value
                for key, value in infos.items()
                if isinstance(value, bool | int | float | str) and key not in ("cfg", "last_ckpt")
            },
        }
    checkpoint["meta"] = {key: _builtin(value) for key, value in checkpoint["meta"].items()}
    return checkpoint


def _history(value: Any) -> dict[str, Any]:
    """Return the newest entries of a history, or an empty dict if it has an unknown format."""
    saved: Any = getattr(value, "saved", {})
    values, counts = saved.get("_log_history"), saved.get("_count_history")
    if (
        not isinstance(values, np.ndarray)
        or not isinstance(counts, np.ndarray)
        or values.dtype.kind not in "iuf"
    ):
        return {}
    newest = values[-1000:].tolist(), counts[-1000:].tolist()
    return {"log_history": newest[0], "count_history": newest[1], "max_length": 10_000}


def _builtin(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
