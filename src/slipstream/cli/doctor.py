"""`slipstream doctor`: machine, versions, devices, levers, and what is misconfigured."""

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

from slipstream.runner.environment import collect_env, default_device

__all__ = ["run"]

Row = tuple[str, str, str]  # mark, name, what about it
_OK, _NO, _WARN = "ok", "--", "!!"
_EXTRAS = {"metrics": "torchmetrics", "wandb": "wandb", "mlflow": "mlflow", "toml": "tomli_w"}


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 if something is misconfigured."""
    device = default_device()
    sections = {
        "Machine": [(_OK, name, str(value)) for name, value in collect_env().items()],
        "Packages": list(_packages()),
        "Levers": list(_levers(device)),
        "Configuration": list(_problems(device)) or [(_OK, "nothing wrong found", "")],
    }
    for title, rows in sections.items():
        print(title)
        width = max(len(name) for _, name, _ in rows)
        for mark, name, text in rows:
            print(f"  {mark}  {name:{width}}  {text}".rstrip())
    return int(any(mark == _WARN for rows in sections.values() for mark, _, _ in rows))


def _packages() -> Iterator[Row]:
    for name in ("slipstream", "torch", "numpy", "pillow", "tensorboard"):
        try:
            yield _OK, name, version(name)
        except PackageNotFoundError:
            yield _WARN, name, "not installed: pip install slipstream"
    for extra, module in _EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        yield (
            (_OK, module, "installed")
            if there
            else (_NO, module, f"optional: pip install 'slipstream[{extra}]'")
        )


def _levers(device: torch.device) -> Iterator[Row]:
    for name in ("bfloat16", "float16"):
        problem = _autocast_problem(device, getattr(torch, name))
        mark, text = (_OK, f"AmpOptimWrapper, dtype='{name}'") if problem is None else (_NO, problem)
        yield mark, f"mixed precision {name}", text
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if device.type != "cpu" or compiler:
        yield (
            _OK,
            "compile",
            f"cfg=dict(compile=True), backend inductor{f' with {compiler}' if compiler else ''}",
        )
    else:
        yield _NO, "compile", "no C++ compiler found: install g++ or clang++, or set CXX"
    yield _OK, "EMA, accumulation, clipping", "on every device"
    backends = [name for name in ("nccl", "gloo", "mpi", "xccl", "hccl") if _has_backend(name)]
    if backends:
        yield _OK, "distributed", f"backends {', '.join(backends)}; launchers pytorch, slurm, mpi"
    else:
        yield _NO, "distributed", "this build of torch has no torch.distributed"
    npu = importlib.util.find_spec("torch_npu") is not None
    yield (
        (_OK if npu else _NO),
        "NpuFused* optimizers",
        "torch_npu" if npu else "stand-ins of the same maths (no torch_npu)",
    )


def _has_backend(name: str) -> bool:
    return dist.is_available() and dist.is_backend_available(name)


def _autocast_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run one matrix product under autocast; return why it cannot be, or None."""
    try:
        with torch.autocast(device.type, dtype=dtype):
            a = torch.ones(8, 8, device=device)
            fits = (a @ a).dtype == dtype
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None if fits else f"autocast on {device.type} does not use it"


def _problems(device: torch.device) -> Iterator[Row]:
    if device.type == "cpu" and shutil.which("nvidia-smi"):
        yield _WARN, "GPU not used", "this machine has an NVIDIA GPU, but this build of torch cannot use it"
    cores, threads = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        (torch.get_num_threads()),
    )
    if device.type == "cpu" and threads < cores and "OMP_NUM_THREADS" in os.environ:
        yield _WARN, "OMP_NUM_THREADS", f"torch uses {threads} of {cores} cores: unset it or raise it"
    if threads > cores:
        yield _WARN, "threads", f"torch uses {threads} threads on {cores} cores: set OMP_NUM_THREADS={cores}"
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None  # noqa: PTH112
    if shm is not None and shm < 256 * 2**20:
        yield (
            _WARN,
            "/dev/shm",
            f"has {shm // 2**20} MiB, too little for data workers: docker run --shm-size=8g",
        )
    if shutil.disk_usage(tempfile.gettempdir()).free < 2**30:
        yield _WARN, "disk", f"less than 1 GiB is free in {tempfile.gettempdir()}"
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) not in (None, "", "0"):
            yield _WARN, name, "is set and makes training slower: unset it outside debugging"
