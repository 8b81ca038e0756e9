"""The environment of a run: device, seeds, process group and versions."""

from __future__ import annotations

import os
import platform
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch

from slipstream.devices import default_device
from slipstream.dist import (
    check_dist_cfg,
    get_backend,
    get_rank,
    get_world_size,
    init_dist,
    is_distributed,
    sync_random_seed,
)
from slipstream.dist.placement import unused_launcher
from slipstream.typecheck import NonNegativeInt, Rule

Seed = Annotated[int, Rule(lambda seed: 0 <= seed < 2**63, "between 0 and 2**63 - 1")]


@dataclass(frozen=True)
class Randomness:
    """Options for the Runner's `randomness` argument."""

    seed: Seed | None = None
    """Seed for all random number generators. If None, one random seed is drawn for all ranks and logged."""
    deterministic: bool = False
    """Use only deterministic algorithms, including on the accelerator. This is slower."""
    diff_rank_seed: bool = False
    """Add the rank to the seed, so that random numbers (for example, in dropout) differ between ranks. This does not
    affect the data order."""


@dataclass(frozen=True)
class MpOptions:
    """Options for `env_cfg.mp_cfg`."""

    mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How data loader workers are started; None keeps the process's current setting."""
    opencv_num_threads: int | None = None
    """Number of OpenCV threads in this process and in forked workers, if OpenCV has already been imported; None keeps
    the current setting."""


@dataclass(frozen=True)
class EnvOptions:
    """Options for the Runner's `env_cfg` argument."""

    cudnn_benchmark: bool = False
    """Let cuDNN benchmark its algorithms for each new input shape, which is faster if input shapes are constant."""
    mp_cfg: MpOptions = field(default_factory=MpOptions)
    """How data loader workers are started, and the number of OpenCV threads."""
    dist_cfg: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `init_dist`, such as `backend`, `timeout` (for collectives, in seconds) and `init_timeout` (for all
    processes to connect, in seconds)."""
    resource_limit: NonNegativeInt = 4096
    """Minimum soft limit on the number of open files; many workers require a high limit."""


def setup_env(launcher: str, options: EnvOptions) -> None:
    """Initialize the process group, and set the open-file limit and the options of worker processes."""
    _raise_file_limit(options.resource_limit)
    if method := options.mp_cfg.mp_start_method:
        torch.multiprocessing.set_start_method(method, force=True)
    if (threads := options.mp_cfg.opencv_num_threads) is not None and "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(threads)
    check_dist_cfg(options.dist_cfg)
    if launcher != "none" and not is_distributed():
        dist_cfg = dict(options.dist_cfg)
        if dist_cfg.get("backend") == "nccl" and not torch.cuda.is_available():
            dist_cfg.pop("backend")  # ignore MMEngine's default, which many configurations contain
        init_dist(launcher, **dist_cfg)
    elif not is_distributed() and (unused := unused_launcher()):
        warnings.warn(
            f"{unused} started several processes, but launcher is 'none', so the processes train independently and "
            f"write to the same work_dir. Set launcher='{unused}'",
            RuntimeWarning,
            stacklevel=2,
        )


def set_random_seed(seed: int | None, deterministic: bool = False, diff_rank_seed: bool = False) -> int:
    """Seed Python, NumPy and torch, and return the seed. If `seed` is None, draw a random seed."""
    if seed is None:
        seed = sync_random_seed()
    rank_seed = seed + get_rank() if diff_rank_seed else seed
    random.seed(rank_seed)
    np.random.seed(rank_seed % 2**32)
    torch.manual_seed(rank_seed)
    if deterministic:
        # cuBLAS is deterministic only with a fixed workspace size, which it reads at initialization.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    return seed


def collect_env() -> Mapping[str, Any]:
    """Return information about the machine for the log: versions, devices, threads and processes."""
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


def _raise_file_limit(minimum: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < minimum:
        limit = minimum if hard == resource.RLIM_INFINITY else min(minimum, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
