import os
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from slipstream.dist import info, launch
from slipstream.dist.launch import init_dist
from slipstream.errors import DistributedError

MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
}


@pytest.fixture
def joined(monkeypatch):
    """Records what would be joined; nothing is."""
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

    monkeypatch.setattr(launch, "open_store", open_store)
    monkeypatch.setattr(launch, "start_failure_detection", lambda: record.update(watched=True))
    monkeypatch.setattr(
        launch.dist, "init_process_group", lambda backend, **kwargs: record.update(kwargs, backend=backend)
    )
    return record


@pytest.fixture
def devices(monkeypatch):
    """Makes accelerators appear; returns the list of the devices that were chosen."""
    chosen = []

    def appear(kind, count):
        accelerator = SimpleNamespace(type=kind)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: accelerator
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        return chosen

    return appear


def test_the_variables_that_torch_reads_are_exported_whatever_the_launcher(joined):
    init_dist("mpi", timeout=90, init_timeout=20)
    assert (joined["rank"], joined["world_size"], joined["init_timeout"]) == (2, 4, 20)
    assert joined["timeout"] == joined["store_timeout"] == timedelta(seconds=90)
    assert joined["watched"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["2", "0", "4", "10.0.0.1", "29500"]
    assert "LOCAL_WORLD_SIZE" not in os.environ, "this launcher did not say"


def test_a_meeting_place_that_the_user_gives_is_left_to_torch(joined):
    init_dist("mpi", init_method="tcp://10.0.0.1:7")
    assert "here" not in joined
    assert joined["init_method"] == "tcp://10.0.0.1:7"


def test_an_init_backend_other_than_torch_is_refused(joined):
    with pytest.raises(DistributedError, match="must be 'torch', not 'deepspeed'"):
        init_dist("mpi", init_backend="deepspeed")


def test_a_build_for_cuda_without_a_gpu_uses_gloo_and_asks_no_device(joined, monkeypatch):
    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "set_device_index", pytest.fail)
    init_dist("mpi")
    assert joined["backend"] == "gloo"


@pytest.mark.parametrize(
    ("kind", "given", "backend"),
    [
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("npu", None, "cpu:gloo,npu:hccl"),
        ("xpu", None, "cpu:gloo,xpu:xccl"),
        ("mps", None, "gloo"),
        ("cuda", "gloo", "gloo"),
        ("cuda", "nccl", "nccl"),
    ],
)
def test_each_accelerator_has_its_backend_beside_gloo(joined, devices, kind, given, backend):
    chosen = devices(kind, 2)
    init_dist("mpi", backend=given)
    assert joined["backend"] == backend
    assert chosen == [0]


@pytest.mark.parametrize(
    ("local_rank", "count", "mask", "backend", "index"),
    [
        (1, 2, "0,3", None, 1),  # the second of the visible ones, which is the machine's fourth
        (3, 1, "3", None, 0),  # srun --gpus-per-task=1: each task sees its own alone
        (3, 2, None, "gloo", 1),  # gloo lets processes share a device
    ],
)
def test_the_device_is_the_local_rank_among_the_visible_ones(
    joined, devices, monkeypatch, local_rank, count, mask, backend, index
):
    chosen = devices("cuda", count)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local_rank))
    if mask:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    init_dist("mpi", backend=backend)
    assert chosen == [index]


@pytest.mark.parametrize(("count", "mask"), [(2, "0,3"), (1, None)])
@pytest.mark.parametrize("backend", [None, "nccl"])
def test_more_processes_than_devices_are_an_error_with_the_numbers(
    joined, devices, monkeypatch, backend, count, mask
):
    devices("cuda", count)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    if mask:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    wanted = rf"LOCAL_RANK=2 \(from OMPI_COMM_WORLD_LOCAL_RANK\) has no device .* and {count} are visible"
    with pytest.raises(DistributedError, match=wanted) as error:
        init_dist("mpi", backend=backend)
    assert not mask or f"CUDA_VISIBLE_DEVICES={mask}" in str(error.value)


@pytest.mark.parametrize(
    ("string", "name", "device"),
    [
        ("gloo", "gloo", "cpu"),
        ("nccl", "nccl", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "nccl", "cuda:1"),
        ("cuda:nccl,cpu:gloo", "nccl", "cuda:1"),
        ("cpu:gloo,cuda:gloo", "gloo", "cpu"),
    ],
)
def test_a_group_with_two_backends_answers_with_the_accelerators(devices, monkeypatch, string, name, device):
    devices("cuda", 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(info, "is_distributed", lambda: True)
    monkeypatch.setattr(info.dist, "get_backend", lambda group: string)
    assert info.get_backend() == name
    assert info.get_comm_device() == torch.device(device)


@pytest.mark.parametrize(
    ("config", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl,cpu:gloo", "cpu"), ("cuda:nccl", "cuda:1")],
)
def test_flags_for_the_host_stay_off_the_accelerator_where_they_can(monkeypatch, config, device):
    monkeypatch.setattr(info.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(info, "get_comm_device", lambda group: torch.device("cuda:1"))
    assert info.flag_device() == torch.device(device)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(timout=3), "dist_cfg has no option 'timout'; did you mean 'timeout'"),
        (dict(timeout="abc"), "dist_cfg.timeout is a number of seconds above 0, not 'abc'"),
        (dict(timeout=-1), "dist_cfg.timeout is a number of seconds above 0, not -1"),
        (dict(init_timeout=0), "dist_cfg.init_timeout is a number of seconds above 0, not 0"),
        (dict(backend="gloop"), "dist_cfg.backend: torch knows no 'gloop'; did you mean 'gloo'"),
        (dict(backend="cpu:gloo,cuda:ncl"), "torch knows no 'ncl'; did you mean 'nccl'"),
    ],
)
def test_wrong_options_are_named_before_anything_is_joined(options, says):
    with pytest.raises(DistributedError, match=re.escape(says)):
        init_dist("pytorch", **options)
