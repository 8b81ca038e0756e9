"""Read pickle files that contain only built-in types, NumPy arrays and tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from slipstream.errors import DataError

__all__ = ["load_plain"]

_ALLOWED_GLOBALS = {
    ("collections", "OrderedDict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    *(("builtins", name) for name in ("set", "frozenset", "complex", "bytearray", "slice", "range")),
    ("_codecs", "encode"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch", "Size"),
    ("torch", "device"),
}


def load_plain(content: bytes) -> Any:
    """Return the object stored in a pickle.

    Raises:
        DataError: if the pickle contains an object of an unsupported type.
    """
    return _PlainUnpickler(io.BytesIO(content)).load()


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that loads only built-in types, NumPy arrays and scalars, and tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage  # replaces torch's function, which would load any object
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED_GLOBALS:
            raise DataError(
                f"the pickle file contains {module}.{name}, which is not loaded, because pickles can execute code; "
                "convert the file to JSON, or store only built-in types, NumPy arrays and tensors"
            )
        return super().find_class(module, name)


def _storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
