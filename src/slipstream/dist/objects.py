"""Collectives for Python objects, and the device of nested tensors, named as in MMEngine.

The collectives also work without a process group. Objects are pickled and sent through the CPU backend if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from slipstream.dist.collectives import all_gather
from slipstream.dist.info import get_comm_device, get_rank, get_world_size
from slipstream.errors import DataError

__all__ = [
    "all_gather_object", "broadcast_object_list", "cast_data_device", "collect_results",
    "collect_results_cpu", "collect_results_gpu", "gather_named_tensors", "gather_object", "get_data_device",
    "own_or_mean", "sync_random_seed",
]  # fmt: skip


def all_gather_object(data: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the list of objects from all ranks, in rank order."""
    size = get_world_size(group)
    if size == 1:
        return [data]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, data, group)
    return gathered


def gather_object(data: Any, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """On rank `dst`, return the objects from all ranks in rank order; on other ranks, return None."""
    size = get_world_size(group)
    if size == 1:
        return [data]
    gathered: list[Any] | None = [None] * size if get_rank() == dst else None
    dist.gather_object(data, gathered, dst, group)
    return gathered


def gather_named_tensors(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> list[dict[str, Tensor]]:
    """On rank 0, return the tensors from all ranks as CPU tensors in rank order; on other ranks, return an empty list.

    The tensor names may differ between ranks. Tensors are gathered one at a time.
    """
    kinds = all_gather_object({name: (t.shape, t.dtype, t.layout) for name, t in tensors.items()}, group)
    gathered: list[dict[str, Tensor]] = [{} for _ in kinds]
    device = get_comm_device(group)
    for name, (shape, dtype, layout) in {
        n: kind for rank_kinds in kinds for n, kind in rank_kinds.items()
    }.items():
        if layout is torch.strided:
            sent = tensors[name] if name in tensors else torch.zeros(shape, dtype=dtype, device=device)
            received: list[Any] = all_gather(sent, group)  # HCCL has no `gather`
        else:  # sparse tensors on different ranks can have different sizes
            received = all_gather_object(tensors[name].cpu() if name in tensors else None, group)
        for rank, tensor in enumerate(received):
            if name in kinds[rank]:
                gathered[rank][name] = tensor.cpu()
    return gathered if get_rank(group) == 0 else []


def own_or_mean(saved: Sequence[Mapping[str, Tensor]], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the tensors that `rank` saved, or the mean over the saved ranks if the number of ranks has changed.

    `saved` is a result of `gather_named_tensors`. Each element contains the tensors of one saved rank. For the
    mean, a tensor that a rank did not save counts as zero.
    """
    if len(saved) == world_size:
        return dict(saved[rank])
    names = {name: None for tensors in saved for name in tensors}
    values = {name: [tensors[name] for tensors in saved if name in tensors] for name in names}
    return {name: torch.stack(parts).sum(0) / len(saved) for name, parts in values.items()}


def broadcast_object_list(data: list[Any], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite the elements of `data` in place with those from rank `src`."""
    if get_world_size(group) > 1:
        dist.broadcast_object_list(data, src, group)


def collect_results(
    results: list[Any], size: int, device: str = "cpu", tmpdir: str | None = None
) -> list[Any] | None:
    """On rank 0, return the results from all ranks in sample order; on other ranks, return None.

    Rank r has the results for samples r, r + world_size, ... The lists are interleaved and truncated to `size`, which
    removes the results of samples that the sampler repeated to give all ranks the same number of samples. `device`
    (cpu, gpu or the name of an accelerator) and `tmpdir` have no effect; they exist for compatibility with MMEngine.
    """
    parts = gather_object(results)
    if parts is None:
        return None
    missing = object()
    ordered = chain.from_iterable(zip_longest(*parts, fillvalue=missing))
    return [result for result in ordered if result is not missing][:size]


def collect_results_cpu(result_part: list[Any], size: int, tmpdir: str | None = None) -> list[Any] | None:
    """Call `collect_results`; provided for compatibility with MMEngine."""
    return collect_results(result_part, size, "cpu", tmpdir)


def collect_results_gpu(result_part: list[Any], size: int) -> list[Any] | None:
    """Call `collect_results`; provided for compatibility with MMEngine."""
    return collect_results(result_part, size, "gpu")


def sync_random_seed(group: dist.ProcessGroup | None = None) -> int:
    """Return a random seed that is the same on every rank."""
    generator = torch.Generator()
    generator.seed()  # seeds from the operating system, so the result does not depend on the global generator
    seed = int(torch.randint(0, 2**31 - 1, (1,), generator=generator))
    return int(all_gather_object(seed, group)[0])


def get_data_device(data: Any) -> torch.device:
    """Return the device of all tensors in `data`, a tensor or nested dicts, lists and tuples of tensors.

    Raises:
        DataError: `data` contains no tensors, an object that is not a tensor, or tensors on different devices.
    """
    devices = {_checked(leaf).device for leaf in tree_leaves(data)}
    if len(devices) == 1:
        return devices.pop()
    found = sorted(map(str, devices))
    raise DataError(f"all tensors in the data must be on the same device, but the devices are {found}")


def cast_data_device(data: Any, device: torch.device, out: Any = None) -> Any:
    """Return `data` with every tensor on `device`, in the same structure of dicts, lists and tuples.

    Args:
        data: a tensor, or nested dicts, lists and tuples of tensors.
        device: target device.
        out: optional output with the same structure as `data`. Its tensors are overwritten, and `out` is returned.

    Raises:
        DataError: `data` contains an object that is not a tensor, or the structure of `out` differs.
    """
    if out is None:
        return tree_map(lambda leaf: _checked(leaf).to(device), data)
    sources, targets = ({keystr(path): leaf for path, leaf in tree_leaves_with_path(x)} for x in (data, out))
    if sources.keys() != targets.keys() or not all(isinstance(target, Tensor) for target in targets.values()):
        raise DataError("`out` must have the same structure as the data: the same keys and lengths")
    for path, target in targets.items():
        target.copy_(_checked(sources[path]))
    return out


def _checked(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise DataError(
            f"the data must consist of tensors in dicts, lists or tuples, not {type(leaf).__name__}"
        )
    return leaf
