"""The surroundings of a run: device, seeds, process group, versions."""

from __future__ import annotations

import os
import platform
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slipstream.dist import (
    get_backend,
    get_rank,
    get_world_size,
    infer_launcher,
    init_dist,
    is_distributed,
    sync_random_seed,
)
from slipstream.dist.placement import placement
from slipstream.errors import DistributedError

__all__ = [
    "EnvOptions",
    "Randomness",
    "collect_env",
    "default_device",
    "device_type",
    "set_random_seed",
    "setup_env",
]


@dataclass(frozen=True)
class Randomness:
    """`randomness` of a Runner."""

    seed: int | None = None
    """Of everything; None draws one, the same on every rank, and logs it."""
    deterministic: bool = False
    """Use deterministic algorithms only, on the accelerator too; slower."""
    diff_rank_seed: bool = False
    """Add the rank to the seed of the model's random numbers (dropout); data never depends on it."""


@dataclass(frozen=True)
class EnvOptions:
    """`env_cfg` of a Runner."""

    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each new input shape; pays when shapes do not change."""
    mp_cfg: dict[str, Any] = field(default_factory=dict)
    """`mp_start_method` of data loader workers, `opencv_num_threads` in them."""
    dist_cfg: dict[str, Any] = field(default_factory=dict)
    """`backend`, `timeout` of collectives and `init_timeout` of the start (seconds), others of `init_process_group`."""
    resource_limit: int = 4096
    """Least soft limit of open files, which many workers need."""


def default_device() -> torch.device:
    """Return the accelerator that torch finds (CUDA, ROCm, NPU, XPU, MPS), or the CPU."""
    kind = device_type()
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def device_type() -> str:
    """Return the kind of `default_device`, without touching the device: a process may still choose its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def setup_env(launcher: str, options: EnvOptions) -> None:
    """Join the process group, set limits and the threads of each process."""
    _raise_file_limit(options.resource_limit)
    if method := options.mp_cfg.get("mp_start_method"):
        torch.multiprocessing.set_start_method(method, force=True)
    if (threads := options.mp_cfg.get("opencv_num_threads")) is not None and "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(threads)
    if launcher != "none" and not is_distributed():
        dist_cfg = dict(options.dist_cfg)
        if dist_cfg.get("backend") == "nccl" and not torch.cuda.is_available():
            dist_cfg.pop("backend")  # MMEngine's default, written into many configurations
        init_dist(launcher, **dist_cfg)
    elif not is_distributed() and (started := _unused_launcher()):
        warnings.warn(
            f"{started} started this process beside others, but launcher is 'none': each of them runs on its own, in "
            f"the same work_dir. Give launcher='{started}'",
            RuntimeWarning,
            stacklevel=2,
        )


def _unused_launcher() -> str | None:
    """Return the launcher that started several processes, if one did."""
    started = infer_launcher()
    try:
        alone = started == "none" or placement(started, os.environ).world_size == 1
    except DistributedError:  # a job's variables, but not those of its processes
        return None
    return None if alone else started


def set_random_seed(seed: int | None, deterministic: bool = False, diff_rank_seed: bool = False) -> int:
    """Seed Python, NumPy and torch, and return the seed, which is drawn if None."""
    if seed is None:
        seed = sync_random_seed()
    own = seed + get_rank() if diff_rank_seed else seed
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    if deterministic:
        # cuBLAS is deterministic only with a fixed workspace, which it reads when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    return seed


def collect_env() -> Mapping[str, Any]:
    """Return what a log should say about the machine: versions, devices, threads, processes."""
    device = default_device()
    info: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": str(device),
        "cpu_threads": torch.get_num_threads(),
        "world_size": get_world_size(),
        **({"backend": get_backend()} if is_distributed() else {}),
    }
    if device.type == "cuda":
        info["device_name"] = torch.cuda.get_device_name(device)
        info["cuda"] = torch.version.cuda or torch.version.hip
        info["cudnn"] = torch.backends.cudnn.version()
    return info


def _raise_file_limit(wanted: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if unlimited else min(wanted, hard), hard))
