"""Checkpoints of sharded models: a folder to which each process writes its shards.

`torch.distributed.checkpoint` writes and reads the tensors. The file `plain.pth` contains the rest: the checkpoint with
None in place of each sharded tensor, and an index of the shards. torch also writes its own index (`.metadata`), for
other tools. This module never reads `.metadata`, because it is a pickle file, which can execute code when it is loaded,
and because it can make torch unpickle further objects.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.files import PLAIN_FILE, read_file, replaced_name, save_checkpoint
from slipstream.checkpoint.integrity import open_verified, verify
from slipstream.dist import all_gather_object, broadcast_object_list, is_main_process
from slipstream.errors import CheckpointError
from slipstream.files import disk_problem, sync_folder
from slipstream.plain_values import plain
from slipstream.sharding import full_tensor, is_sharded, placements_on

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "consolidate",
    "load_checkpoint",
    "load_sharded",
    "read_meta",
    "read_origin",
    "read_without_data",
    "remove_partial_checkpoints",
    "sharded_name",
    "verify_checkpoint",
    "write_checkpoint",
]

Warn = Callable[[str], None]


def sharded_name(name: str) -> str:
    """Return the folder name of a sharded checkpoint, such as `epoch_3.sharded` for `epoch_3.pth`."""
    return name.removesuffix(".pth").removesuffix(".sharded") + ".sharded"


def write_checkpoint(
    checkpoint: Mapping[str, Any],
    path: Path,
    warn: Warn,
    consolidate: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint and return its path. All ranks must call this function.

    If the checkpoint contains no sharded tensors, rank 0 writes the file `path`. Otherwise, every rank writes its
    shards to the `sharded_name(path.name)` folder. If `consolidate` is True, rank 0 instead gathers one tensor at a
    time into CPU memory and writes the file `path`. `group` is used for all communication except gathering tensors.

    Raises:
        CheckpointError: a rank failed to write; raised on every rank.
    """
    tensors: dict[str, Tensor] = {}
    paths: dict[str, list[Any]] = {}

    def extract(path: tuple[Any, ...], tensor: Tensor) -> None:
        # The index makes the keys unique, because different path elements (1 and "1") can have the same string form.
        key = f"{len(tensors)}/" + "/".join(map(str, path))
        tensors[key], paths[key] = tensor, list(path)

    if is_main_process():
        content = plain(checkpoint, warn)
    else:  # only the sharded tensors are needed
        content = plain(checkpoint, lambda _: None, copy=lambda _, tensor: tensor)
    rest = _map_sharded(content, extract)
    if tensors and not consolidate:
        folder = path.with_name(sharded_name(path.name))
        _write_folder(folder, rest, tensors, paths, group)
        return folder
    for key, tensor in tensors.items():
        full = full_tensor(tensor)
        if is_main_process():
            _put(rest, paths[key], full.cpu())
    _on_main(lambda: save_checkpoint(rest, path, warn), path, group)
    return path


def load_checkpoint(
    path: str | Path, map_location: str | torch.device = "cpu", mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Read a checkpoint file or the folder of a sharded checkpoint, without executing code from the checkpoint.

    Args:
        path: path of the checkpoint.
        map_location: device on which to load the tensors.
        mesh: device mesh over which to shard the tensors of a sharded checkpoint; by default, they are not sharded.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or contains pickled objects.
    """
    path = Path(path)
    return load_sharded(path, map_location, mesh) if path.is_dir() else read_file(path, map_location)


def load_sharded(
    folder: Path, map_location: str | torch.device = "cpu", mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Read a sharded checkpoint. No process group or communication is required.

    Args:
        folder: checkpoint folder, written by any number of processes.
        map_location: device on which to load tensors that are not sharded.
        mesh: device mesh over which to shard the tensors; each rank then reads its own rows. By default, every process
            reads the full tensors.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    content = read_file(folder / PLAIN_FILE, map_location)
    with _reading(folder):
        checkpoint, index = content["checkpoint"], content["index"]
        for key, entry in index.items():
            _check_parts(key, entry)
        tensors = {key: _empty(entry, map_location, mesh) for key, entry in index.items()}
        _read(folder, index, tensors)
        for key, tensor in tensors.items():
            _put(checkpoint, index[key]["path"], tensor)
        return dict(checkpoint)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise any exception
        raise CheckpointError(
            f"{folder} is incomplete or damaged ({type(error).__name__}: {error}); use another checkpoint"
        ) from error


def read_meta(path: Path) -> dict[str, Any]:
    """Return the `meta` entry of a checkpoint without reading the shards of a sharded checkpoint."""
    with _reading(path):
        content = read_file(path / PLAIN_FILE)["checkpoint"] if path.is_dir() else read_file(path)
        meta: dict[str, Any] = content.get("meta", {})
        return meta


def read_without_data(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint, without the data of the tensors and without the shards.

    The time depends on the number of tensors, but not on their sizes.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with _reading(path):
        is_sharded = path.is_dir()
        content = read_file(path / PLAIN_FILE if is_sharded else path, "meta")
        checkpoint: dict[str, Any] = content["checkpoint"] if is_sharded else content
        return checkpoint


def read_origin(path: Path) -> tuple[str | None, int | None]:
    """Return the ID of the run that wrote a checkpoint, and the iteration; None for an entry that cannot be read."""
    try:
        with _reading(path):
            meta = read_without_data(path).get("meta", {})
            run_id, iteration = meta.get("run_id"), meta.get("iter")
    except CheckpointError:
        return None, None
    return run_id if isinstance(run_id, str) else None, iteration if isinstance(iteration, int) else None


def verify_checkpoint(path: Path, part: int = 0, num_parts: int = 1) -> None:
    """Verify a checkpoint against its checksums.

    For a sharded checkpoint, only every `num_parts`-th shard is verified, starting at shard `part`.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
    """
    if not path.is_dir():
        if part == 0:
            verify(path)
        return
    with _reading(path):
        index = read_file(path / PLAIN_FILE)["index"]
        shards = [shard for entry in index.values() for shard in entry["parts"]]
        for _, _, name, start, length in shards[part::num_parts]:
            verify(path / _file_name(name), start, length)


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove the incomplete sharded checkpoints left by processes that were killed while writing to `folder`.

    The caller must ensure that no other process writes to this folder.
    """
    for path in folder.glob(".*.sharded.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.sharded"):
        shutil.rmtree(replaced_name(path), ignore_errors=True)


def consolidate(folder: str | Path, out: str | Path, warn: Warn = warnings.warn) -> None:
    """Convert a sharded checkpoint into a single file, using a single process and CPU memory.

    Raises:
        CheckpointError: `folder` is not a sharded checkpoint, or it is damaged.
    """
    folder = Path(folder)
    if not (folder / PLAIN_FILE).is_file():
        raise CheckpointError(
            f"{folder} is not a sharded checkpoint, because it contains no {PLAIN_FILE}; pass a folder such as "
            "epoch_3.sharded"
        )
    save_checkpoint(load_sharded(folder), out, warn)


# ---- trees of built-in Python values -------------------------------------------------------------------


def _map_sharded(
    value: Any, replace: Callable[[tuple[Any, ...], Tensor], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return a copy of nested containers with every sharded tensor replaced by `replace(path, tensor)`."""
    if is_sharded(value):
        return replace(path, value)
    if isinstance(value, Mapping):
        return {k: _map_sharded(v, replace, (*path, k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_sharded(v, replace, (*path, i)) for i, v in enumerate(value)]
    return value


def _put(tree: Any, path: list[Any], tensor: Tensor) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = tensor


# ---- writing --------------------------------------------------------------------------------------------


def _write_folder(
    folder: Path,
    rest: Any,
    tensors: dict[str, Tensor],
    paths: dict[str, list[Any]],
    group: dist.ProcessGroup | None,
) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    temporary = folder.with_name(f".{folder.name}.tmp")

    class Writer(FileSystemWriter):
        """Record where each shard is stored, because some versions of torch do not add the location to the metadata."""

        places: Mapping[Any, Any] = {}

        def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
            super().finish(metadata, results)
            self.places = {
                result.index: result.storage_data for rank_results in results for result in rank_results
            }

    writer = Writer(temporary)

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while writing
        temporary.mkdir(parents=True)

    def commit() -> None:
        index = _index(metadata, writer.places, paths)
        save_checkpoint({"checkpoint": rest, "index": index}, temporary / PLAIN_FILE, lambda _: None)
        old = replaced_name(folder)
        if folder.exists():  # otherwise `old` may be the only complete checkpoint
            shutil.rmtree(old, ignore_errors=True)
            folder.replace(old)
        temporary.replace(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)

    _on_main(begin, folder, group)
    missing = [rank for rank, exists in enumerate(all_gather_object(temporary.is_dir(), group)) if not exists]
    if missing:
        raise CheckpointError(
            f"ranks {missing} cannot access {folder.parent}; put the work_dir on a shared file system"
        )
    try:
        metadata = save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # raised on every rank if any rank failed
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)  # free the space, because the disk may be full
        raise CheckpointError(f"{folder} cannot be written: {_reason(error, folder.parent)}") from error
    _on_main(commit, folder, group)


def _on_main(action: Callable[[], None], path: Path, group: dist.ProcessGroup | None) -> None:
    """Call `action` on rank 0; if it fails, raise an error on every rank."""
    failure: Exception | None = None
    if is_main_process():
        try:
            action()
        except Exception as error:
            failure = error
    problem = [failure and _describe(failure, path.parent)]
    broadcast_object_list(problem, group=group)
    if problem[0] is not None:
        raise CheckpointError(f"{path} cannot be written: {problem[0]}") from failure


def _index(metadata: Metadata, places: Mapping[Any, Any], paths: dict[str, list[Any]]) -> dict[str, Any]:
    """Return torch's index as built-in Python values: for each key, the path, dtype, shape and shards of the tensor."""
    index: dict[str, Any] = {}
    for key, path in paths.items():
        entry: Any = metadata.state_dict_metadata[key]
        index[key] = {"path": path, "dtype": entry.properties.dtype, "shape": list(entry.size), "parts": []}
    for where, file in places.items():
        chunks = metadata.state_dict_metadata[where.fqn].chunks  # type: ignore[union-attr]
        sizes = next(chunk.sizes for chunk in chunks if chunk.offsets == where.offset)
        part = (list(where.offset), list(sizes), file.relative_path, file.offset, file.length)
        index[where.fqn]["parts"].append(part)
    return index


def _reason(error: CheckpointException, folder: Path) -> str:
    """Return the errors of the failed ranks, without their tracebacks."""
    return "; ".join(
        f"rank {rank}: {_describe(failure[0], folder)}" for rank, failure in error.failures.items()
    )


def _describe(error: BaseException, folder: Path) -> str:
    if (problem := disk_problem(error, folder)) is None:
        return repr(error)
    return f"{problem}. Earlier checkpoints are kept. Free some space, then continue with resume=True"


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
        try:  # no_dist: each process independently reads the shards it requires
            load(tensors, storage_reader=_reader(folder, _metadata(index)), no_dist=True)
        except CheckpointException as error:  # derives from BaseException, not from Exception
            raise ValueError(_reason(error, folder)) from error


def _metadata(index: Mapping[str, Any]) -> Metadata:
    """Convert the index to torch's `Metadata`. Even with a manipulated index, torch only reads tensors."""
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
            _file_name(name)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            files[MetadataIndex(key, offsets)] = _StorageInfo(name, start, length)
        shape = torch.Size(entry["shape"])
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=entry["dtype"]), shape, chunks)
    return Metadata(dict(entries), storage_data=files)


def _file_name(name: str) -> str:
    if name in ("", "..") or Path(name).name != name:
        raise CheckpointError(f"the shard index refers to the file {name!r}, which is outside the checkpoint")
    return name


def _reader(folder: Path, metadata: Metadata) -> FileSystemReader:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.futures import Future

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            for item in plan.items:
                place = metadata.storage_data[item.storage_index]
                with open_verified(folder / place.relative_path, place.offset, place.length) as file:
                    shard = torch.load(file, map_location="cpu", weights_only=True)
                for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    shard = shard.narrow(dim, offset, size)
                target = planner.resolve_tensor(item).detach()
                target.copy_(shard)
                planner.commit_tensor(item, target)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    return Reader(folder)


def _check_parts(key: str, entry: Mapping[str, Any]) -> None:
    """Check that a tensor's shards cover it without gaps, which torch would leave uninitialized."""
    shape, parts = entry["shape"], [(offsets, sizes) for offsets, sizes, *_ in entry["parts"]]
    inside = all(
        len(offsets) == len(sizes) == len(shape)
        and all(
            0 <= first <= first + size <= length
            for first, size, length in zip(offsets, sizes, shape, strict=True)
        )
        for offsets, sizes in parts
    )
    disjoint = not any(_overlap(a, b) for a, b in combinations(parts, 2))
    if not inside or not disjoint or sum(math.prod(sizes) for _, sizes in parts) != math.prod(shape):
        raise ValueError(f"the shards of '{key}' do not cover its shape {list(shape)}")


def _overlap(a: tuple[list[int], list[int]], b: tuple[list[int], list[int]]) -> bool:
    return all(max(x, y) < min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
