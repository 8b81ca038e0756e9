"""`slipstream doctor`: machine, versions, devices, options and misconfigurations."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from slipstream.cores import cores
from slipstream.devices import default_device
from slipstream.dist import infer_launcher
from slipstream.dist.placement import placement
from slipstream.errors import DistributedError
from slipstream.runner.environment import collect_env
from slipstream.speed.compile import inductor_problem

__all__ = ["run"]

Row = tuple[str, str, str]  # mark, name, description
_OK, _NO, _WARN = "ok", "--", "!!"
_EXTRAS = {
    "images": "PIL",
    "recipes": "hydra",
    "plots": "matplotlib",
    "tensorboard": "tensorboard",
    "metrics": "torchmetrics",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "toml": "tomli_w",
    "png": "pywuffs",
}
_GAINS = {"png": ", which decodes PNGs three times as fast"}


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 if something is misconfigured."""
    device = default_device()
    sections = {
        "Machine": [(_OK, name, str(value)) for name, value in collect_env().items()],
        "Packages": list(_packages()),
        "Options": list(_options(device)),
        "Distributed": list(_distributed(device)),
        "Configuration": list(_problems(device)) or [(_OK, "no problems found", "")],
    }
    for title, rows in sections.items():
        print(title)
        width = max(len(name) for _, name, _ in rows)
        for mark, name, text in rows:
            print(f"  {mark}  {name:{width}}  {text}".rstrip())
    return int(any(mark == _WARN for rows in sections.values() for mark, _, _ in rows))


def _packages() -> Iterator[Row]:
    for name in ("slipstream", "torch", "numpy"):
        try:
            yield _OK, name, version(name)
        except PackageNotFoundError:
            yield _WARN, name, "not installed: pip install slipstream"
    for extra, module in _EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        yield (
            (_OK, module, "installed")
            if there
            else (_NO, module, f"optional: pip install 'slipstream[{extra}]'{_GAINS.get(extra, '')}")
        )


def _options(device: torch.device) -> Iterator[Row]:
    for name in ("bfloat16", "float16"):
        problem = _autocast_problem(device, getattr(torch, name))
        mark, text = (_OK, f"AmpOptimWrapper, dtype='{name}'") if problem is None else (_NO, problem)
        yield mark, f"mixed precision {name}", text
    yield _compile(device)
    yield _OK, "EMA, accumulation, clipping", "supported on every device"
    npu = importlib.util.find_spec("torch_npu") is not None
    yield (
        (_OK if npu else _NO),
        "NpuFused* optimizers",
        "torch_npu" if npu else "pure PyTorch implementation (torch_npu is not installed)",
    )


def _compile(device: torch.device) -> Row:
    if (problem := inductor_problem(device.type)) is not None:
        return _NO, "compile", problem
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if device.type == "cpu" and not compiler:
        return _NO, "compile", "no C++ compiler found: install g++ or clang++, or set CXX"
    return (
        _OK,
        "compile",
        f"cfg=dict(compile=True), backend inductor{f' with {compiler}' if compiler else ''}",
    )


def _distributed(device: torch.device) -> Iterator[Row]:
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    masks = [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]
    yield _OK, "devices", ", ".join([f"{count} {device.type}" if count else "cpu", *map(_setting, masks)])
    backends = [name for name in ("nccl", "gloo", "mpi", "xccl", "hccl") if _has_backend(name)]
    if backends:
        yield _OK, "backends", ", ".join(backends)
    else:
        yield _NO, "backends", "this build of torch has no torch.distributed"
    yield _launcher()
    yield _OK, "threads", f"{torch.get_num_threads()} on {cores()} cores, {_setting('OMP_NUM_THREADS')}"


def _has_backend(name: str) -> bool:
    return dist.is_available() and dist.is_backend_available(name)


def _launcher() -> Row:
    launcher = infer_launcher()
    if launcher == "none":
        return (
            _OK,
            "launcher",
            "not started by a launcher; use train --nproc, submit, or --launcher pytorch, slurm, mpi",
        )
    try:
        here = placement(launcher, os.environ)
    except DistributedError as error:
        return _WARN, "launcher", str(error)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return _OK, "launcher", ", ".join([launcher, *map(here.describe, names)])


def _setting(name: str) -> str:
    return f"{name}={os.environ[name]}" if name in os.environ else f"{name} not set"


def _autocast_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run one matrix product under autocast. Return the error message, or None on success."""
    try:
        with torch.autocast(device.type, dtype=dtype):
            a = torch.ones(8, 8, device=device)
            fits = (a @ a).dtype == dtype
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None if fits else f"autocast on {device.type} does not support {dtype}"


def _problems(device: torch.device) -> Iterator[Row]:
    if device.type == "cpu" and shutil.which("nvidia-smi"):
        yield (
            _WARN,
            "GPU not used",
            "this machine has an NVIDIA GPU, but this build of torch does not support it",
        )
    threads, alone = torch.get_num_threads(), infer_launcher() == "none"
    if device.type == "cpu" and alone and threads < cores() and "OMP_NUM_THREADS" in os.environ:
        yield _WARN, "OMP_NUM_THREADS", f"torch uses {threads} of {cores()} cores: unset or increase it"
    if threads > cores():
        yield (
            _WARN,
            "threads",
            f"torch uses {threads} threads on {cores()} cores: set OMP_NUM_THREADS={cores()}",
        )
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None  # noqa: PTH112
    if shm is not None and shm < 256 * 2**20:
        yield (
            _WARN,
            "/dev/shm",
            f"{shm // 2**20} MiB is too small for data loader workers: use docker run --shm-size=8g",
        )
    if shutil.disk_usage(tempfile.gettempdir()).free < 2**30:
        yield _WARN, "disk", f"less than 1 GiB is free in {tempfile.gettempdir()}"
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) not in (None, "", "0"):
            yield _WARN, name, "is set and slows down training: unset it unless you are debugging"
