"""`slipstream doctor`: report the machine, versions, devices, options and misconfigurations."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.cgroups import memory_limit
from slipstream.cli.configure import load_config
from slipstream.cores import cores
from slipstream.devices import default_device
from slipstream.dist import infer_launcher
from slipstream.runner.environment import collect_env
from slipstream.speed.compile import inductor_problem

Row = tuple[str, str, str]  # mark, name, description
OK, NO, WARN = "ok", "--", "!!"

# Maps the optional dependencies in pyproject.toml to a module of each.
_EXTRAS = {
    "images": "PIL", "recipes": "hydra", "plots": "matplotlib", "tensorboard": "tensorboard",
    "metrics": "torchmetrics", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "toml": "tomli_w",
    "png": "imagecodecs", "jpeg": "simplejpeg", "video": "av", "export": "onnxruntime",
}  # fmt: skip
_MIN_SHM, _MIN_MEMORY = 256 * 2**20, 2 * 2**30
_DEBUGGING = ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 if something is misconfigured."""
    device = default_device()
    sections = {
        "Machine": [(OK, name, str(value)) for name, value in collect_env().items()],
        "Packages": list(_packages()),
        "Options": list(_options(device)),
        "Distributed": list(_distributed(device)),
        "Configuration": list(problems(device, _recipe_workers(args))) or [(OK, "no problems found", "")],
    }
    for title, found in sections.items():
        print(title)
        width = max(len(name) for _, name, _ in found)
        for mark, name, text in found:
            print(f"  {mark}  {name:{width}}  {text}".rstrip())
    return int(any(mark == WARN for found in sections.values() for mark, _, _ in found))


def _recipe_workers(args: argparse.Namespace) -> dict[str, int]:
    """Return the recipe's integer `num_workers` values by config path, or an empty dict if no recipe is given."""
    if args.config is None:
        return {}
    cfg = load_config(args.config, args.overrides, args.config_dir, bool(args.trust)).cfg
    paths = {f"{split}_dataloader": cfg.get(f"{split}_dataloader") for split in ("train", "val")}
    counts = {f"{path}.num_workers": loader.get("num_workers", 0) for path, loader in paths.items() if loader}
    return {path: count for path, count in counts.items() if isinstance(count, int)}


def _packages() -> Iterator[Row]:
    for name in ("slipstream", "torch", "numpy"):
        yield OK, name, version(name)
    for extra, module in _EXTRAS.items():
        installed = importlib.util.find_spec(module) is not None
        text = "installed" if installed else f"optional: pip install 'slipstream[{extra}]'"
        yield OK if installed else NO, module, text


def _options(device: torch.device) -> Iterator[Row]:
    for dtype in (torch.bfloat16, torch.float16):
        supported = torch.amp.is_autocast_available(device.type)
        yield OK if supported else NO, f"mixed precision {str(dtype).removeprefix('torch.')}", ""
    problem = _compile_problem(device)
    yield (NO if problem else OK), "compile", problem or "cfg=dict(compile=True), backend inductor"


def _compile_problem(device: torch.device) -> str | None:
    from torch.utils._triton import has_triton

    if device.type in ("cuda", "xpu") and not has_triton():
        return f"inductor requires Triton for {device.type}, which is missing or does not support this device"
    if problem := inductor_problem(device.type):
        return problem
    if not (os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++", "c++")))):
        return "no C++ compiler found: install g++ or clang++, or set CXX"
    return None


def _distributed(device: torch.device) -> Iterator[Row]:
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    masks = [f"{name}={value}" for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")]
    yield OK, "devices", ", ".join([f"{count} {device.type}" if count else "cpu", *masks])
    names = ("nccl", "gloo", "mpi", "xccl", "hccl") if dist.is_available() else ()
    backends = [name for name in names if dist.is_backend_available(name)]
    yield (OK if backends else NO), "backends", ", ".join(backends) or "torch.distributed is not available"
    launcher, names = infer_launcher(), ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    yield OK, "launcher", ", ".join([launcher, *found])
    yield OK, "threads", f"{torch.get_num_threads()} on {cores()} cores"


def problems(device: torch.device, workers: Mapping[str, int]) -> Iterator[Row]:
    """Yield the misconfigurations (`!!`), and the settings that can be improved (`--`).

    Args:
        device: the default device.
        workers: `num_workers` of a recipe by config path.
    """
    threads, available = torch.get_num_threads(), cores()
    if device.type == "cpu" and shutil.which("nvidia-smi"):
        text = "torch finds no GPU: install torch with CUDA, or check CUDA_VISIBLE_DEVICES"
        yield WARN, "GPU not used", text
    alone = device.type == "cpu" and infer_launcher() == "none"
    if alone and "OMP_NUM_THREADS" in os.environ and threads < available:
        yield WARN, "OMP_NUM_THREADS", f"torch uses {threads} of {available} cores: unset this variable"
    if threads > available:
        text = f"torch uses {threads} threads on {available} cores: set OMP_NUM_THREADS={available}"
        yield WARN, "threads", text
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for path, count in workers.items():
        if (total := count * processes) > available:
            text = f"{total} workers on {available} cores: set num_workers=auto, or request more cores"
            yield WARN, path, text
    yield from _memory_problems()
    for name in _DEBUGGING:
        if os.environ.get(name) not in (None, "", "0"):
            yield WARN, name, "is set and slows down training: unset it unless you are debugging"


def _memory_problems() -> Iterator[Row]:
    shm = Path("/dev/shm")
    if shm.is_dir() and (size := shutil.disk_usage(shm).total) < _MIN_SHM:
        text = f"{size // 2**20} MiB is too small for data loader workers: use docker run --shm-size=8g, or "
        yield WARN, "/dev/shm", text + "in Kubernetes an emptyDir volume with medium: Memory"
    limit = memory_limit()
    if limit is not None and limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        text = (
            f"{limit / 2**30:.1f} GiB, including workers and /dev/shm; above this limit, processes are killed"
        )
        yield WARN if limit < _MIN_MEMORY else NO, "cgroup memory", text
