"""Checks for `slipstream doctor`, which find misconfigurations of the machine and suggest fixes."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from slipstream.cgroups import memory_limit, quotas
from slipstream.cores import cores
from slipstream.dist import infer_launcher
from slipstream.speed.compile import inductor_problem

__all__ = ["NO", "OK", "WARN", "Machine", "Row", "inspect_machine", "problems"]

Row = tuple[str, str, str]  # mark, name, description
OK, NO, WARN = "ok", "--", "!!"

_GIB = 2**30
_MIN_SHM = 256 * 2**20
_MIN_SHM_SPEED = 0.5e9  # bytes per second; ordinary memory is several times as fast
_SHM_SAMPLE = 64 * 2**20
_MIN_MEMORY = 2 * _GIB
_DEBUGGING = ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


@dataclass(frozen=True)
class Machine:
    """Properties of this machine and process. None means unknown or not applicable."""

    device: str = "cpu"
    """Type of the default device."""
    cores: int = 1
    """Cores that this process may use."""
    cpu_quota: float | None = None
    """Smallest cgroup CPU quota, in cores."""
    threads: int = 1
    """Number of torch threads."""
    local_processes: int = 1
    """Number of processes that the launcher started on this machine."""
    launcher: str = "none"
    memory: int | None = None
    """Memory of the machine in bytes."""
    memory_limit: int | None = None
    """Smallest cgroup memory limit, in bytes."""
    shm_total: int | None = None
    """Size of /dev/shm in bytes."""
    shm_speed: float | None = None
    """Measured write speed of /dev/shm, in bytes per second."""
    temporary: str = "/tmp"
    temporary_free: int = 2**40
    nvidia_smi: bool = False
    """Whether the PATH contains `nvidia-smi`, which is installed with the NVIDIA driver."""
    compiler: str | None = None
    """Path of a C++ compiler."""
    inductor_problem: str | None = None
    native_bf16: bool | None = None
    """Whether the CPU has bfloat16 instructions."""
    bf16_ratio: float | None = None
    """Measured time of a bfloat16 matrix multiplication on the CPU, relative to float32."""
    tf32: bool | None = None
    """Whether float32 matrix multiplications use TF32, on a device that supports it."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """`num_workers` of a recipe by config path."""
    environ: Mapping[str, str] = field(default_factory=dict)


def problems(machine: Machine) -> Iterator[Row]:
    """Yield the misconfigurations (`!!`), and the settings that can be improved (`--`)."""
    for check in _CHECKS:
        yield from check(machine)


def _gpu(machine: Machine) -> Iterator[Row]:
    if machine.device == "cpu" and machine.nvidia_smi:
        yield (
            WARN,
            "GPU not used",
            "the NVIDIA driver is installed, but torch finds no GPU: install torch with CUDA, or check "
            "CUDA_VISIBLE_DEVICES",
        )


def _threads(machine: Machine) -> Iterator[Row]:
    alone = machine.launcher == "none"
    if (
        machine.device == "cpu"
        and alone
        and machine.threads < machine.cores
        and "OMP_NUM_THREADS" in machine.environ
    ):
        yield (
            WARN,
            "OMP_NUM_THREADS",
            f"torch uses {machine.threads} of {machine.cores} cores: unset this variable or increase it",
        )
    if machine.threads > machine.cores:
        yield (
            WARN,
            "threads",
            f"torch uses {machine.threads} threads on {_num_cores(machine.cores)}: set OMP_NUM_THREADS={machine.cores}",
        )


def _workers(machine: Machine) -> Iterator[Row]:
    """Compare the process and worker counts with the number of cores. Each process starts its own workers."""
    if machine.local_processes > machine.cores:
        yield (
            WARN,
            "cores",
            f"{machine.local_processes} processes share {_num_cores(machine.cores)}: start fewer processes, or request "
            "more cores",
        )
    for path, count in machine.workers.items():
        total = count * machine.local_processes
        if total > machine.cores:
            yield (
                WARN,
                path,
                f"{total} workers on {_num_cores(machine.cores)}: set num_workers=auto, which measures and selects the "
                "best value, or request more cores (sbatch --cpus-per-task)",
            )


def _num_cores(cores: int) -> str:
    return f"{cores} core{'s' * (cores != 1)}"


def _shared_memory(machine: Machine) -> Iterator[Row]:
    if machine.shm_total is not None and machine.shm_total < _MIN_SHM:
        yield (
            WARN,
            "/dev/shm",
            f"{machine.shm_total // 2**20} MiB is too small for data loader workers: use docker run --shm-size=8g, "
            "or in Kubernetes mount an emptyDir volume with medium: Memory at /dev/shm",
        )
    if machine.shm_speed is not None and machine.shm_speed < _MIN_SHM_SPEED:
        yield (
            WARN,
            "/dev/shm",
            f"is slow ({machine.shm_speed / 1e9:.2f} GB/s measured), and every batch from a worker passes through it: "
            "mount a tmpfs there, or set num_workers=0",
        )


def _cgroup(machine: Machine) -> Iterator[Row]:
    quota, limit = machine.cpu_quota, machine.memory_limit
    if quota is not None and quota < machine.cores:
        yield (
            NO,
            "cgroup cpu.max",
            f"{quota:g} core{'s' * (quota != 1)}, so {machine.cores} busy threads are throttled: request a whole "
            "number of cores (docker run --cpus, resources.limits.cpu)",
        )
    if limit is None or (machine.memory is not None and limit >= machine.memory):
        return
    text = f"{limit / _GIB:.1f} GiB"
    if machine.memory is not None:
        text += f" of the machine's {machine.memory / _GIB:.1f} GiB"
    small = limit < _MIN_MEMORY
    yield (
        WARN if small else NO,
        "cgroup memory",
        f"{text}, including workers and /dev/shm; above this limit, a process is killed without an error message: "
        + (
            "increase the limit"
            if small
            else "request more if a run is killed (docker run --memory, sbatch --mem)"
        ),
    )


def _disk(machine: Machine) -> Iterator[Row]:
    if machine.temporary_free < _GIB:
        yield WARN, "disk", f"less than 1 GiB is free in {machine.temporary}: free some space, or set TMPDIR"


def _compiler(machine: Machine) -> Iterator[Row]:
    if machine.inductor_problem is not None:
        yield NO, "compile", machine.inductor_problem
    elif machine.compiler is None:
        which = "generated code" if machine.device == "cpu" else "Triton's launchers and generated CPU code"
        yield NO, "compile", f"no C++ compiler found for {which}: install g++ or clang++, or set CXX"


def _precision(machine: Machine) -> Iterator[Row]:
    if machine.device == "cpu" and machine.native_bf16 is False:
        measured = ""
        if machine.bf16_ratio is not None:
            measured = f" (measured: matrix multiplication takes {machine.bf16_ratio:.1f} times as long as in float32)"
        yield (
            NO,
            "bfloat16",
            f"this CPU has no bfloat16 instructions, so bfloat16 is emulated{measured}: measure before you set "
            "precision='bf16'",
        )
    if machine.tf32 is False:
        yield (
            NO,
            "TF32",
            "is off, so float32 matrix multiplications do not use tensor cores: set speed=dict(precision='tf32') or "
            "'bf16' if that precision is sufficient",
        )


def _debugging(machine: Machine) -> Iterator[Row]:
    for name in _DEBUGGING:
        if machine.environ.get(name) not in (None, "", "0"):
            yield WARN, name, "is set and slows down training: unset it unless you are debugging"


_CHECKS: tuple[Callable[[Machine], Iterator[Row]], ...] = (
    _gpu, _threads, _workers, _shared_memory, _cgroup, _disk, _compiler, _precision, _debugging,
)  # fmt: skip


# ---- this machine --------------------------------------------------------------------------------------


def inspect_machine(device: torch.device, workers: Mapping[str, int] | None = None) -> Machine:
    """Return the properties of this machine. The measurements take a fraction of a second."""
    shm = Path("/dev/shm")
    total = shutil.disk_usage(shm).total if shm.is_dir() else None
    native = _native_bf16() if device.type == "cpu" else None
    return Machine(
        device=device.type,
        cores=cores(),
        cpu_quota=min(quotas(), default=None),
        threads=torch.get_num_threads(),
        local_processes=_local_processes(),
        launcher=infer_launcher(),
        memory=_memory(),
        memory_limit=memory_limit(),
        shm_total=total,
        shm_speed=_write_speed(shm) if total else None,
        temporary=tempfile.gettempdir(),
        temporary_free=shutil.disk_usage(tempfile.gettempdir()).free,
        nvidia_smi=shutil.which("nvidia-smi") is not None,
        compiler=os.environ.get("CXX")
        or shutil.which("g++")
        or shutil.which("clang++")
        or shutil.which("c++"),
        inductor_problem=_inductor_problem(device),
        native_bf16=native,
        bf16_ratio=_bf16_ratio() if native is False else None,
        tf32=_tf32(device),
        workers=workers or {},
        environ=os.environ,
    )


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _local_processes() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def _write_speed(folder: Path) -> float | None:
    """Return the write speed in bytes per second, or None if the folder is too small or not writable."""
    try:
        if shutil.disk_usage(folder).free < 2 * _SHM_SAMPLE:
            return None
        data = bytearray(_SHM_SAMPLE)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = perf_counter()
            file.write(data)
            return len(data) / (perf_counter() - start)
    except OSError:
        return None


def _inductor_problem(device: torch.device) -> str | None:
    from torch.utils._triton import has_triton

    if device.type in ("cuda", "xpu") and not has_triton():
        return f"inductor requires Triton for {device.type}: Triton is not installed, or does not support this device"
    return inductor_problem(device.type)


def _native_bf16() -> bool | None:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _bf16_ratio(size: int = 512, count: int = 5) -> float:
    """Return the median ratio of bfloat16 to float32 time for a (size, size) matrix multiplication."""

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(size, size, dtype=dtype)
        start = perf_counter()
        a @ a
        return perf_counter() - start

    seconds(torch.bfloat16), seconds(torch.float32)  # the first call selects the kernel
    return median(seconds(torch.bfloat16) / seconds(torch.float32) for _ in range(count))


def _tf32(device: torch.device) -> bool | None:
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return torch.get_float32_matmul_precision() != "highest"
