import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from slipstream.dist import launch
from slipstream.dist.launch import init_dist

MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
}


@pytest.fixture
def joined(monkeypatch):
    """Set MPI's variables, and record the arguments to `init_process_group` instead of creating the process group."""
    record = {}
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_")) or name in launch._MASKS:
            monkeypatch.delenv(name)
    for name, value in MPI.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("MASTER_PORT", "")

    def open_store(here, seconds):
        record.update(here=here, init_timeout=seconds)
        return SimpleNamespace(set_timeout=lambda timeout: record.update(store_timeout=timeout))

    monkeypatch.setattr(launch, "_open_store", open_store)
    monkeypatch.setattr(launch, "start_failure_detection", lambda: record.update(detection_started=True))
    monkeypatch.setattr(
        launch.dist, "init_process_group", lambda backend, **kwargs: record.update(kwargs, backend=backend)
    )
    return record


@pytest.fixture
def devices(monkeypatch):
    """Return a function that simulates accelerators and returns the list of selected devices."""
    chosen = []

    def appear(kind, count):
        accelerator = SimpleNamespace(type=kind)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: accelerator
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        supported = {"gloo": ["cpu", "cuda"], "nccl": ["cuda"], "xccl": ["xpu"], "hccl": ["npu"]}
        monkeypatch.setattr(launch.dist.Backend, "backend_capability", supported)
        return chosen

    return appear


def test_init_dist_exports_the_variables_that_torch_reads(joined):
    init_dist("mpi", timeout=90, init_timeout=20)
    assert (joined["rank"], joined["world_size"], joined["init_timeout"]) == (2, 4, 20)
    assert joined["timeout"] == joined["store_timeout"] == timedelta(seconds=90)
    assert joined["detection_started"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["2", "0", "4", "10.0.0.1", "29500"]
    assert "LOCAL_WORLD_SIZE" not in os.environ, "init_dist did not remove the stale LOCAL_WORLD_SIZE"


def test_cuda_build_without_a_gpu_uses_gloo_and_selects_no_device(joined, monkeypatch):
    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "set_device_index", pytest.fail)
    init_dist("mpi")
    assert joined["backend"] == "gloo"


@pytest.mark.parametrize(
    ("kind", "requested", "backend"),
    [
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("npu", None, "cpu:gloo,npu:hccl"),
        ("xpu", None, "cpu:gloo,xpu:xccl"),
        ("cuda", "gloo", "gloo"),
        ("cuda", "nccl", "nccl"),
    ],
)
def test_each_accelerator_uses_its_backend_and_gloo(joined, devices, kind, requested, backend):
    chosen = devices(kind, 2)
    init_dist("mpi", backend=requested)
    assert joined["backend"] == backend
    assert chosen == [0]


@pytest.mark.parametrize(
    ("local_rank", "count", "mask", "backend", "index"),
    [
        (1, 2, "0,3", None, 1),  # the second visible device is the fourth device of the machine
        (3, 1, "3", None, 0),  # srun --gpus-per-task=1: each task has one visible device
        (3, 2, None, "gloo", 1),  # with gloo, processes can share a device
    ],
)
def test_local_rank_selects_among_the_visible_devices(
    joined, devices, monkeypatch, local_rank, count, mask, backend, index
):
    chosen = devices("cuda", count)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local_rank))
    if mask:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    init_dist("mpi", backend=backend)
    assert chosen == [index]
