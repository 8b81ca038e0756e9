"""Initialization of the process group from the environment of torchrun, Slurm or MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from slipstream.dist.failure_detection import start_failure_detection
from slipstream.dist.info import is_distributed
from slipstream.dist.placement import Placement, read_placement
from slipstream.errors import DistributedError, did_you_mean
from slipstream.typecheck import Positive, matches

_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
_OPTIONS = (
    "backend", "init_backend", "timeout", "init_timeout", "port", "init_method", "store", "group_name", "pg_options",
    "device_id",
)  # fmt: skip
_MASKS = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)  # fmt: skip


def init_dist(launcher: str, backend: str | None = None, init_backend: str = "torch", **kwargs: Any) -> None:
    """Initialize the default process group, select the device of this process and start failure detection.

    Args:
        launcher: `pytorch`, `slurm` or `mpi`.
        backend: by default, gloo for CPU tensors and objects, and the accelerator's backend for tensors on the
            accelerator: `cpu:gloo,cuda:nccl` (hccl on NPU, xccl on XPU), or `gloo` if there is no accelerator.
        init_backend: must be `torch`; MMEngine's other values are not supported.
        kwargs: `timeout` (for collectives, in seconds), `init_timeout` (for all processes to connect, in seconds;
            default 300), `port`, and other arguments for `torch.distributed.init_process_group`.

    Raises:
        DistributedError: an option is invalid, an environment variable of the launcher is missing or invalid, processes
            are missing, or this machine has more processes than devices. The message names the option or variable and
            its value.
    """
    if is_distributed():
        return
    check_dist_cfg(kwargs)
    if init_backend != "torch":
        raise DistributedError(f"init_backend must be 'torch', not {init_backend!r}")
    placement = read_placement(launcher, os.environ, kwargs.pop("port", None))
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    os.environ.update(placement.environ())
    # Without `check_available`, a CUDA build returns "cuda" even on a machine without a GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    native = _BACKENDS.get(accelerator.type) if accelerator else None
    backend = backend or (f"cpu:gloo,{accelerator.type}:{native}" if accelerator and native else "gloo")
    if accelerator is not None:
        torch.accelerator.set_device_index(
            _device_index(placement, torch.accelerator.device_count(), backend)
        )
    if "timeout" in kwargs and not isinstance(kwargs["timeout"], timedelta):
        kwargs["timeout"] = timedelta(seconds=kwargs["timeout"])
    init_timeout = float(kwargs.pop("init_timeout", 300))
    if not kwargs.get("init_method") and not kwargs.get("store"):
        kwargs["store"] = _open_store(placement, init_timeout)
        kwargs["store"].set_timeout(kwargs.get("timeout", timedelta(minutes=30)))
    dist.init_process_group(backend, rank=placement.rank, world_size=placement.world_size, **kwargs)
    start_failure_detection()


def _open_store(placement: Placement, seconds: float) -> Any:
    """Return the store of rank 0 or of torchrun, after all processes have connected to it."""
    place = f"MASTER_ADDR={placement.master_addr}, MASTER_PORT={placement.master_port}"
    try:
        store = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
        # torchrun may keep one store across restarts, with the addresses of exited processes.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        if store.add(f"rank {placement.rank}", 1) > 1:
            raise DistributedError(
                f"rank {placement.rank} connected twice to {place}; each rank must be unique"
            )
        return store
    except dist.DistError as error:
        raise DistributedError(
            f"the {placement.world_size} processes could not connect to rank 0 at {place} within {seconds:g} s "
            f"(rank {placement.rank}: {error}). Check that every process was started with this address and world size "
            "and a unique rank, that no other job uses the port, and that no firewall blocks it"
        ) from error


def check_dist_cfg(dist_cfg: Mapping[str, Any]) -> None:
    """Raise a `DistributedError` if `dist_cfg` contains an unknown option or an invalid timeout."""
    for name, value in dist_cfg.items():
        if name not in _OPTIONS:
            raise DistributedError(f"dist_cfg has no option '{name}'{did_you_mean(name, _OPTIONS)}")
        if name.endswith("timeout") and not isinstance(value, timedelta) and not matches(value, Positive):
            raise DistributedError(f"dist_cfg.{name} must be a positive number of seconds, not {value!r}")


def _device_index(placement: Placement, count: int, backend: str) -> int:
    """Return the index of this process's device among the visible devices.

    A launcher may make only one device visible to each process, for example with `srun --gpus-per-task=1`. The index is
    then 0 for every local rank.
    """
    if placement.local_rank < count:
        return placement.local_rank
    shared = not any(name in backend for name in _BACKENDS.values())
    if shared or (count == 1 and any(name in os.environ for name in _MASKS)):
        return placement.local_rank % count
    mask = next((f" ({name}={os.environ[name]})" for name in _MASKS if name in os.environ), "")
    gloo = ", or use backend='gloo'" if "nccl" in backend else ""  # gloo supports CUDA tensors
    raise DistributedError(
        f"no device for LOCAL_RANK={placement.local_rank}: {backend} requires one device for each process, but {count} "
        f"are visible{mask}; start {count} processes per machine{gloo}"
    )
