"""Tests of `slipstream doctor`."""

import pytest
import torch

from slipstream.cli import doctor
from slipstream.cli.doctor import WARN, problems
from slipstream.cli.main import main

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """Simulate a machine with 8 cores, without problems."""
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", *doctor._DEBUGGING):
        monkeypatch.delenv(name, raising=False)
    for name, value in dict(cores=8, infer_launcher="none", memory_limit=None).items():
        monkeypatch.setattr(doctor, name, lambda value=value: value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "nvidia-smi" else f"/bin/{name}")
    return monkeypatch


def found(workers=None):
    return {name: (mark, text) for mark, name, text in problems(CPU, workers or {}) if name != "/dev/shm"}


def test_a_healthy_machine_has_no_problems():
    assert found({"train_dataloader.num_workers": 8}) == {}


def test_each_problem_is_reported_with_its_remedy(healthy):
    healthy.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    healthy.setattr(torch, "get_num_threads", lambda: 2)
    healthy.setenv("OMP_NUM_THREADS", "2")
    healthy.setenv("TORCH_COMPILE_DISABLE", "1")
    healthy.setattr(doctor, "memory_limit", lambda: 2**30)
    reported = found({"train_dataloader.num_workers": 16})
    assert {name for name, (mark, _) in reported.items() if mark == WARN} == {
        "GPU not used", "OMP_NUM_THREADS", "train_dataloader.num_workers", "cgroup memory",
        "TORCH_COMPILE_DISABLE",
    }  # fmt: skip
    assert "16 workers on 8 cores: set num_workers=auto" in reported["train_dataloader.num_workers"][1]


def test_the_report_has_all_sections_and_the_status_depends_on_warnings(healthy, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{title}\n" in f"\n{text}" for title in ("Machine", "Packages", "Options", "Distributed"))
    healthy.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert main(["doctor"]) == 1
    assert "!!  CUDA_LAUNCH_BLOCKING" in capsys.readouterr().out


def test_workers_of_a_recipe_are_checked(healthy, capsys):
    healthy.setattr(doctor, "cores", lambda: 2)
    healthy.setattr(torch, "get_num_threads", lambda: 2)
    assert main(["doctor", "street_scenes_pp_lite_t", "train_dataloader.num_workers=5"]) == 1
    assert "5 workers on 2 cores" in capsys.readouterr().out
