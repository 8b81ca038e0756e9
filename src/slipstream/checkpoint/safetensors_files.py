"""Read and write weights in safetensors files, the format of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.extras import extra
from slipstream.files import atomic_write

INDEX = ".index.json"
SUFFIX = ".safetensors"


def is_safetensors(file: IO[bytes]) -> bool:
    """Return whether the open file begins with a safetensors header: its length in eight bytes, and a JSON object."""
    begin = file.read(9)
    size = file.seek(0, 2)
    file.seek(0)
    return begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= size


def in_folder(folder: Path) -> Path | None:
    """Return the index of the weights in a folder in Hugging Face's layout, or its only safetensors file, or None."""
    for pattern in (f"*{SUFFIX}{INDEX}", f"*{SUFFIX}"):
        if len(found := list(folder.glob(pattern))) == 1:
            return found[0]
    return None


def read_safetensors(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of all files that an index (`*.safetensors.index.json`) lists.

    Raises:
        CheckpointError: a file is missing or damaged, or does not contain the tensors that the index lists.
        MissingPackageError: the package is not installed.
    """
    with extra("safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        if not path.name.endswith(INDEX):
            return dict(load_file(path, str(device)))
        places: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        tensors: dict[str, Tensor] = {}
        for name in sorted(set(places.values())):
            if Path(name).name != name:
                raise CheckpointError(f"{path} refers to the file {name!r}, which is in another folder")
            tensors |= load_file(path.with_name(name), str(device))
        return {key: tensors[key] for key in places}
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is incomplete or damaged ({error}); use another file") from error


def save_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    """Write tensors to a safetensors file atomically; tied weights are written separately."""
    with extra("safetensors"):
        from safetensors.torch import save_file

    tensors = {
        name: value.contiguous().clone() for name, value in weights.items() if isinstance(value, Tensor)
    }
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, {"format": "pt"})  # transformers requires this entry
