"""Tests of the checks of `slipstream doctor`: each misconfiguration is reported with its remedy."""

import os

import pytest
import torch

from slipstream.cli import doctor_checks
from slipstream.cli.doctor_checks import NO, WARN, Machine, inspect_machine, problems
from slipstream.cli.main import main

GIB = 2**30
HEALTHY = dict(
    cores=8,
    threads=8,
    memory=64 * GIB,
    memory_limit=64 * GIB,
    shm_total=8 * GIB,
    shm_speed=2e9,
    compiler="/usr/bin/g++",
    native_bf16=True,
    workers={"train_dataloader.num_workers": 8},
    environ={},
)


def found(**changes):
    return list(problems(Machine(**{**HEALTHY, **changes})))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_healthy_machine_has_no_problems(device):
    assert found(device=device, tf32=None) == []
    assert found(device=device, tf32=True, cpu_quota=8.0) == []


@pytest.mark.parametrize(
    ("changes", "mark", "name", "said"),
    [
        (dict(nvidia_smi=True), WARN, "GPU not used", "install torch with CUDA"),
        (dict(threads=2, environ={"OMP_NUM_THREADS": "2"}), WARN, "OMP_NUM_THREADS", "2 of 8 cores"),
        (dict(threads=16), WARN, "threads", "set OMP_NUM_THREADS=8"),
        (dict(local_processes=9, workers={}), WARN, "cores", "9 processes share 8 cores"),
        (
            dict(workers={"val_dataloader.num_workers": 9}),
            WARN,
            "val_dataloader.num_workers",
            "9 workers on 8 cores",
        ),
        (
            dict(local_processes=2),
            WARN,
            "train_dataloader.num_workers",
            "16 workers on 8 cores: set num_workers=auto",
        ),
        (dict(shm_total=64 * 2**20), WARN, "/dev/shm", "64 MiB is too small"),
        (dict(shm_speed=0.1e9), WARN, "/dev/shm", "is slow (0.10 GB/s measured)"),
        (dict(cpu_quota=7.5), NO, "cgroup cpu.max", "7.5 cores, so 8 busy threads"),
        (dict(memory_limit=GIB), WARN, "cgroup memory", "1.0 GiB of the machine's 64.0 GiB"),
        (dict(memory_limit=16 * GIB), NO, "cgroup memory", "16.0 GiB of the machine's 64.0 GiB"),
        (dict(memory_limit=16 * GIB, memory=None), NO, "cgroup memory", "16.0 GiB, including workers"),
        (
            dict(temporary_free=1000, temporary="/t"),
            WARN,
            "disk",
            "free in /t: free some space, or set TMPDIR",
        ),
        (dict(compiler=None), NO, "compile", "no C++ compiler found for generated code: install g++"),
        (dict(compiler=None, device="cuda"), NO, "compile", "Triton's launchers"),
        (dict(inductor_problem="no code generator"), NO, "compile", "no code generator"),
        (
            dict(native_bf16=False, bf16_ratio=3.14),
            NO,
            "bfloat16",
            "3.1 times as long as in float32",
        ),
        (dict(native_bf16=False), NO, "bfloat16", "is emulated: measure before"),
        (dict(device="cuda", tf32=False), NO, "TF32", "speed=dict(precision='tf32')"),
        (dict(environ={"CUDA_LAUNCH_BLOCKING": "1"}), WARN, "CUDA_LAUNCH_BLOCKING", "unset it"),
        (dict(environ={"TORCH_COMPILE_DISABLE": "1"}), WARN, "TORCH_COMPILE_DISABLE", "unset it"),
    ],
)
def test_problem_is_reported_with_its_remedy(changes, mark, name, said):
    ((found_mark, found_name, text),) = found(**changes)
    assert (found_mark, found_name) == (mark, name)
    assert said in text


@pytest.mark.parametrize(
    "changes",
    [
        dict(environ={"CUDA_LAUNCH_BLOCKING": "0"}),
        dict(threads=2, launcher="pytorch", environ={"OMP_NUM_THREADS": "2"}),
        dict(device="cuda", threads=2, environ={"OMP_NUM_THREADS": "2"}),
        dict(device="cuda", nvidia_smi=True),
        dict(device="cuda", native_bf16=False),
        dict(native_bf16=None),
        dict(memory_limit=None, shm_total=None, shm_speed=None, memory=None),
        dict(memory_limit=100 * GIB),
    ],
)
def test_settings_without_effect_are_not_reported(changes):
    assert found(**changes) == []


def test_write_speed_is_measured_and_no_file_remains(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_checks, "_SHM_SAMPLE", 2**20)
    assert doctor_checks._write_speed(tmp_path) > 0
    assert not list(tmp_path.iterdir())
    assert doctor_checks._write_speed(tmp_path / "missing") is None
    monkeypatch.setattr(doctor_checks, "_SHM_SAMPLE", 2**60)  # more than is free
    assert doctor_checks._write_speed(tmp_path) is None


def test_bfloat16_time_ratio_is_positive():
    assert doctor_checks._bf16_ratio(size=16, count=1) > 0


def test_gpu_without_triton_cannot_compile(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert "requires Triton for cuda" in doctor_checks._inductor_problem(torch.device("cuda"))


def test_this_machine_is_inspected(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    machine = inspect_machine(torch.device("cpu"))
    assert machine.local_processes == 3
    assert machine.threads == torch.get_num_threads()
    assert machine.memory > GIB / 4
    assert machine.environ is os.environ
    assert (machine.bf16_ratio is not None) == (machine.native_bf16 is False)


def test_worker_count_of_a_recipe_is_checked(capsys, monkeypatch):
    monkeypatch.setattr(doctor_checks, "cores", lambda: 4)
    assert main(["doctor", "street_scenes_regseg48", "num_workers=9"]) == 1
    assert "train_dataloader.num_workers  9 workers on 4 cores" in capsys.readouterr().out


def test_unknown_recipe_raises_an_error(capsys):
    assert main(["doctor", "street_scenes_regseg"]) == 2
    assert "did you mean 'street_scenes_regseg48'" in capsys.readouterr().err
