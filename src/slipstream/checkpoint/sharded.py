"""Checkpoints of sharded models: a folder to which each process writes a file with its shards.

The file `plain.pth` contains the rest: the checkpoint with None in place of each sharded tensor, and an index of the
shards. All files are written and read like ordinary checkpoint files, so no code in them is executed.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.files import PLAIN_FILE, read_file, replaced_name, save_checkpoint, verify
from slipstream.checkpoint.safetensors_files import SUFFIX, in_folder
from slipstream.checkpoint.weights import revise, weights_in
from slipstream.dist import all_gather_object, get_rank, is_main_process
from slipstream.errors import CheckpointError, explained
from slipstream.files import sync_folder
from slipstream.plain_values import plain
from slipstream.sharding import full_tensor, is_sharded, local_shard, placements_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "consolidate", "load_checkpoint", "load_sharded", "read_meta", "read_origin", "read_without_data",
    "remove_partial_checkpoints", "sharded_name", "verify_checkpoint", "write_checkpoint",
]  # fmt: skip

Warn = Callable[[str], None]
Action = Callable[[], None]
Group: TypeAlias = "dist.ProcessGroup | None"


def sharded_name(name: str) -> str:
    """Return the folder name of a sharded checkpoint, such as `epoch_3.sharded` for `epoch_3.pth`."""
    return name.removesuffix(".pth").removesuffix(".sharded") + ".sharded"


def write_checkpoint(
    checkpoint: Mapping[str, Any],
    path: Path,
    warn: Warn,
    consolidate: bool = False,
    group: Group = None,
    on_saved: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a checkpoint. All ranks must call this function.

    If the checkpoint contains no sharded tensors, rank 0 writes the file `path`. Otherwise, every rank writes its
    shards to the `sharded_name(path.name)` folder. If `consolidate` is True, rank 0 instead gathers one tensor at a
    time into CPU memory and writes the file `path`. `group` is used for all communication except gathering tensors.
    `on_saved` is called on rank 0 with the path of the complete checkpoint.

    Raises:
        CheckpointError: a rank failed to write, or `on_saved` failed; raised on every rank.
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
    if tensors and not consolidate and path.suffix != SUFFIX:
        path = path.with_name(sharded_name(path.name))
        _write_folder(path, rest, tensors, paths, group)
    else:
        for key, tensor in tensors.items():
            full = full_tensor(tensor)
            if is_main_process():
                _put(rest, paths[key], full.cpu())
        _on_main(lambda: save_checkpoint(rest, path, warn), path, group)
    _on_main(lambda: on_saved(path), path, group, "was written, but an action after it failed")


def load_checkpoint(
    path: str | Path,
    map_location: str | torch.device = "cpu",
    mesh: DeviceMesh | None = None,
    revise_keys: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Read a checkpoint file or the folder of a sharded checkpoint, without executing code from the checkpoint.

    Args:
        path: path of the checkpoint; or a safetensors file, its index, or a folder that contains them.
        map_location: device on which to load the tensors.
        mesh: device mesh over which to shard the tensors of a sharded checkpoint; by default, they are not sharded.
        revise_keys: (pattern, replacement) pairs that rename the weights, as in `re.sub`. The renamed weights are in
            the entry `state_dict`, even if the file has them in another entry.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or contains pickled objects.
    """
    path = Path(path)
    path = (in_folder(path) if path.is_dir() else None) or path
    checkpoint = load_sharded(path, map_location, mesh) if path.is_dir() else read_file(path, map_location)
    if revise_keys:
        checkpoint["state_dict"] = revise(weights_in(checkpoint, path), revise_keys)
    return checkpoint


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
        needed: dict[str, list[tuple[str, Tensor, Sequence[int], Sequence[int]]]] = {}
        for key, entry in index.items():
            if sum(math.prod(size) for _, size, _ in entry["parts"]) != math.prod(entry["shape"]):
                raise ValueError(f"the shards of '{key}' do not cover its shape {list(entry['shape'])}")
            tensor = _empty(entry, map_location, mesh)
            target, at = local_shard(tensor), _offset(tensor)
            for start, size, name in entry["parts"]:
                if _overlap(at, target.shape, start, size) is not None:
                    needed.setdefault(name, []).append((key, target, at, start))
            _put(checkpoint, entry["path"], tensor)
        for name, parts in needed.items():
            shards = read_file(folder / _file_name(name))
            for key, target, position, start in parts:
                slices = _overlap(position, target.shape, start, shards[key].shape)
                assert slices is not None
                target[slices[0]].copy_(shards[key][slices[1]])
        return dict(checkpoint)


def _reading(folder: Path) -> AbstractContextManager[None]:
    remedy = "use another checkpoint"
    return explained(CheckpointError, lambda why: f"{folder} is incomplete or damaged ({why}); {remedy}")


def read_meta(path: Path) -> dict[str, Any]:
    """Return the `meta` entry of a checkpoint without reading the shards of a sharded checkpoint."""
    with _reading(path):
        content = read_file(path / PLAIN_FILE)["checkpoint"] if path.is_dir() else read_file(path)
        return content.get("meta", {})


def read_without_data(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint, without the data of the tensors and without the shards.

    The time depends on the number of tensors, but not on their sizes.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with _reading(path):
        is_sharded = path.is_dir()
        content = read_file(path / PLAIN_FILE if is_sharded else path, "meta")
        return content["checkpoint"] if is_sharded else content


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

    For a sharded checkpoint, only every `num_parts`-th file with shards is verified, starting at file `part`.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
    """
    if not path.is_dir():
        if part == 0:
            with path.open("rb") as file:
                verify(file, path)
        return
    with _reading(path):
        index = read_file(path / PLAIN_FILE)["index"]
        names = sorted({name for entry in index.values() for _, _, name in entry["parts"]})
        for name in names[part::num_parts]:
            with (path / _file_name(name)).open("rb") as file:
                verify(file, path / name)


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
    group: Group,
) -> None:
    temporary, file = folder.with_name(f".{folder.name}.tmp"), f"rank_{get_rank()}.pth"
    own = {key: tensor for key, tensor in tensors.items() if _writes(tensor)}

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while writing
        temporary.mkdir(parents=True)

    def write() -> None:
        if not temporary.is_dir():
            raise CheckpointError(
                f"the rank cannot access {folder.parent}; put the work_dir on a shared file system"
            )
        shards = {key: local_shard(tensor) for key, tensor in own.items()}
        save_checkpoint(shards, temporary / file, lambda _: None)

    def commit() -> None:
        index = {
            key: {
                "path": paths[key],
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "parts": [rank_parts[key] for rank_parts in parts if key in rank_parts],
            }
            for key, tensor in tensors.items()
        }
        save_checkpoint({"checkpoint": rest, "index": index}, temporary / PLAIN_FILE, lambda _: None)
        old = replaced_name(folder)
        if folder.exists():  # otherwise `old` may be the only complete checkpoint
            shutil.rmtree(old, ignore_errors=True)
            folder.replace(old)
        temporary.replace(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)

    places = {key: (_offset(tensor), list(local_shard(tensor).shape), file) for key, tensor in own.items()}
    parts = all_gather_object(places, group)
    try:
        _on_main(begin, folder, group)
        _agreed(write, folder, group)
        _on_main(commit, folder, group)
    except CheckpointError:
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)  # free the space, because the disk may be full
        raise


def _writes(tensor: Any) -> bool:
    """Return whether this process writes its shard: the shard has elements, and it is the first of several replicas."""
    coordinates = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    is_first = all(index == 0 for placement, index in coordinates if placement.is_replicate())
    return is_first and local_shard(tensor).numel() > 0


def _on_main(action: Action, path: Path, group: Group, failed: str = "cannot be written") -> None:
    """Call `action` on rank 0; if it fails, raise an error on every rank."""
    _agreed(action if is_main_process() else lambda: None, path, group, failed)


def _agreed(action: Action, path: Path, group: Group, failed: str = "cannot be written") -> None:
    """Call `action` on every rank; if it fails on one of them, raise an error on every rank."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    problems = all_gather_object(failure and _describe(failure), group)
    if any(problems):
        text = "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
        raise CheckpointError(f"{path} {failed}: {text}") from failure


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error}; check the free space and the permissions, then continue from the last checkpoint"
    return str(error) if isinstance(error, CheckpointError) else repr(error)


# ---- reading --------------------------------------------------------------------------------------------


def _empty(entry: Mapping[str, Any], device: str | torch.device, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return torch.empty(entry["shape"], dtype=entry["dtype"], device=device)
    from torch.distributed.tensor import empty

    return empty(entry["shape"], dtype=entry["dtype"], device_mesh=mesh, placements=placements_on(mesh))


def _offset(tensor: Any) -> list[int]:
    """Return the position of the local shard's first element in the full tensor."""
    if not is_sharded(tensor):
        return [0] * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return list(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def _overlap(
    at: Sequence[int], size: Sequence[int], other_at: Sequence[int], other_size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the elements that two parts of a tensor have in common, as slices of each part, or None."""
    low = [max(a, b) for a, b in zip(at, other_at, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(at, size, other_at, other_size, strict=True)]
    if any(first >= last for first, last in zip(low, high, strict=True)):
        return None
    own = tuple(slice(first - a, last - a) for first, last, a in zip(low, high, at, strict=True))
    return own, tuple(slice(first - b, last - b) for first, last, b in zip(low, high, other_at, strict=True))


def _file_name(name: str) -> str:
    if name in ("", "..") or Path(name).name != name:
        raise CheckpointError(f"the shard index refers to the file {name!r}, which is outside the checkpoint")
    return name
