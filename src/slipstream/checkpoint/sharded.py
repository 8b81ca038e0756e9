"""Checkpoints of sharded models: a folder in which each process has written its own parts of the tensors.

The tensors are written and read by `torch.distributed.checkpoint`. Everything else lies in `plain.pth`: the checkpoint
with None where a sharded tensor belongs, and an index that says where its parts are. torch writes an index of
its own (`.metadata`), for other tools; it is never read here, since it is a pickle and can, besides, declare any
entry to be an object that torch would unpickle.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.checkpoint.files import load_checkpoint, plain, save_checkpoint
from slipstream.dist import all_gather_object, broadcast_object_list, is_main_process
from slipstream.dist.sharding import is_sharded, placements_on, whole
from slipstream.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["consolidate", "load_sharded", "read_meta", "sharded_name", "write_checkpoint"]

PLAIN = "plain.pth"
Warn = Callable[[str], None]


def sharded_name(name: str) -> str:
    """Return the name of the folder that stands for a file: `epoch_3.sharded` for `epoch_3.pth`."""
    return name.removesuffix(".pth").removesuffix(".sharded") + ".sharded"


def write_checkpoint(
    checkpoint: Mapping[str, Any], path: Path, warn: Warn, consolidate: bool = False
) -> Path:
    """Write a checkpoint and return its path; every rank calls it.

    Without sharded tensors rank 0 writes the file `path`. With them, every rank writes its parts to a folder
    that is called `sharded_name(path.name)`; or, to `consolidate`, rank 0 gathers one tensor after the other
    into its main memory and writes the file.

    Raises:
        CheckpointError: on every rank, if one of them could not write.
    """
    tensors: dict[str, Tensor] = {}
    paths: dict[str, list[Any]] = {}

    def take(place: tuple[Any, ...], tensor: Tensor) -> None:
        key = f"{len(tensors)}/" + "/".join(map(str, place))  # the number keeps apart what only prints alike
        tensors[key], paths[key] = tensor, list(place)

    rest = _mapped(plain(checkpoint, warn if is_main_process() else lambda _: None), take)
    if tensors and not consolidate:
        folder = path.with_name(sharded_name(path.name))
        _write_folder(folder, rest, tensors, paths)
        return folder
    for key, tensor in tensors.items():
        full = whole(tensor)
        if is_main_process():
            _put(rest, paths[key], full.cpu())
    _on_main(lambda: save_checkpoint(rest, path, warn), path)
    return path


def load_sharded(
    folder: Path, map_location: str | torch.device = "cpu", mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Read a sharded checkpoint; no process group is needed, and nothing is sent between processes.

    Args:
        folder: where it lies, whatever number of processes wrote it.
        map_location: the device of plain tensors.
        mesh: whoever is on it gets its own rows of each sharded tensor; by default everybody gets the whole.

    Raises:
        CheckpointError: it is incomplete or damaged.
    """
    content = load_checkpoint(folder / PLAIN, map_location)
    try:
        checkpoint, index = content["checkpoint"], content["index"]
        tensors = {key: _empty(entry, map_location, mesh) for key, entry in index.items()}
        _read(folder, index, tensors)
        for key, tensor in tensors.items():
            _put(checkpoint, index[key]["path"], tensor)
    except Exception as error:  # damaged files can raise nearly anything
        raise CheckpointError(
            f"{folder} is incomplete or damaged ({type(error).__name__}: {error})"
        ) from error
    return dict(checkpoint)


def read_meta(path: Path) -> dict[str, Any]:
    """Return a checkpoint's `meta`; of a sharded one without reading the shards."""
    content = load_checkpoint(path / PLAIN).get("checkpoint", {}) if path.is_dir() else load_checkpoint(path)
    meta: dict[str, Any] = content.get("meta", {})
    return meta


def consolidate(folder: str | Path, out: str | Path, warn: Warn = warnings.warn) -> None:
    """Turn a sharded checkpoint into one ordinary file; one process does it, in main memory.

    Raises:
        CheckpointError: `folder` is no sharded checkpoint, or is damaged.
    """
    folder = Path(folder)
    if not (folder / PLAIN).is_file():
        raise CheckpointError(f"{folder} is not a sharded checkpoint: it has no {PLAIN}")
    save_checkpoint(load_sharded(folder), out, warn)


# ---- trees of plain values -----------------------------------------------------------------------------


def _mapped(value: Any, change: Callable[[tuple[Any, ...], Tensor], Any], place: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested containers with every sharded tensor replaced by `change(place, tensor)`."""
    if is_sharded(value):
        return change(place, value)
    if isinstance(value, Mapping):
        return {k: _mapped(v, change, (*place, k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_mapped(v, change, (*place, i)) for i, v in enumerate(value)]
    return value


def _put(tree: Any, place: list[Any], tensor: Tensor) -> None:
    for key in place[:-1]:
        tree = tree[key]
    tree[place[-1]] = tensor


# ---- writing --------------------------------------------------------------------------------------------


def _write_folder(folder: Path, rest: Any, tensors: dict[str, Tensor], paths: dict[str, list[Any]]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    temporary = folder.with_name(f".{folder.name}.tmp")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while it wrote
        temporary.mkdir(parents=True)

    def finish() -> None:
        index = _index(metadata, paths)
        save_checkpoint({"checkpoint": rest, "index": index}, temporary / PLAIN, lambda _: None)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
        shutil.rmtree(old, ignore_errors=True)

    _on_main(begin, folder)
    blind = [rank for rank, sees in enumerate(all_gather_object(temporary.is_dir())) if not sees]
    if blind:
        raise CheckpointError(f"ranks {blind} do not see {folder.parent}: put the work_dir on a shared disk")
    try:
        metadata = save(tensors, storage_writer=FileSystemWriter(temporary))
    except CheckpointException as error:  # raised on every rank, whichever failed
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
        raise CheckpointError(f"{folder} cannot be written: {_reason(error)}") from error
    _on_main(finish, folder)


def _on_main(action: Callable[[], None], path: Path) -> None:
    """Do it on rank 0, and let every rank know if it failed."""
    failure: Exception | None = None
    if is_main_process():
        try:
            action()
        except Exception as error:
            failure = error
    problem = [failure and repr(failure)]
    broadcast_object_list(problem)
    if problem[0] is not None:
        raise CheckpointError(f"{path} cannot be written: {problem[0]}") from failure


def _index(metadata: Metadata, paths: dict[str, list[Any]]) -> dict[str, Any]:
    """Return torch's index as plain values: by key the place, dtype and shape of a tensor, and its parts."""
    index: dict[str, Any] = {}
    for key, place in paths.items():
        entry: Any = metadata.state_dict_metadata[key]
        index[key] = {"path": place, "dtype": entry.properties.dtype, "shape": list(entry.size), "parts": []}
    for where, file in metadata.storage_data.items():
        chunks = metadata.state_dict_metadata[where.fqn].chunks  # type: ignore[union-attr]
        sizes = next(chunk.sizes for chunk in chunks if chunk.offsets == where.offset)
        part = (list(where.offset), list(sizes), file.relative_path, file.offset, file.length)
        index[where.fqn]["parts"].append(part)
    return index


def _reason(error: CheckpointException) -> str:
    """Return what failed on which ranks, without their tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())


# ---- reading --------------------------------------------------------------------------------------------


def _empty(entry: Mapping[str, Any], device: str | torch.device, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return torch.empty(entry["shape"], dtype=entry["dtype"], device=device)
    from torch.distributed.tensor import empty

    return empty(entry["shape"], dtype=entry["dtype"], device_mesh=mesh, placements=placements_on(mesh))


def _read(folder: Path, index: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:  # no_dist: each process reads for itself what it needs
            load(tensors, storage_reader=_reader(folder, _metadata(index)), no_dist=True)
        except CheckpointException as error:  # no Exception, only a BaseException
            raise ValueError(_reason(error)) from error


def _metadata(index: Mapping[str, Any]) -> Metadata:
    """Return torch's own form of our index; whatever it says, torch only reads tensors by it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries, files = {}, {}
    for key, entry in index.items():
        chunks = []
        for offsets, sizes, name, start, length in entry["parts"]:
            if Path(name).name != name:
                raise ValueError(f"its index names a file of another folder, {name!r}")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            files[MetadataIndex(key, offsets)] = _StorageInfo(name, start, length)
        shape = torch.Size(entry["shape"])
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=entry["dtype"]), shape, chunks)
    return Metadata(dict(entries), storage_data=files)


def _reader(folder: Path, metadata: Metadata) -> FileSystemReader:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    return Reader(folder)
