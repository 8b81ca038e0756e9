import subprocess
from types import SimpleNamespace

import pytest
import torch

from slipstream.dist import launch
from slipstream.dist.launch import Placement, first_host, init_dist, placement
from slipstream.errors import DistributedError

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NODELIST": "gpu[07-08]"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
}


@pytest.fixture(autouse=True)
def _no_scontrol(monkeypatch):
    def run(*args, **kwargs):
        raise FileNotFoundError("scontrol")

    monkeypatch.setattr(launch.subprocess, "run", run)


@pytest.mark.parametrize(
    ("launcher", "environ", "port", "wanted"),
    [
        ("pytorch", TORCHRUN, None, Placement(5, 1, 8, "node0", "1234")),
        ("pytorch", TORCHRUN, 7, Placement(5, 1, 8, "node0", "7")),
        ("slurm", SLURM, None, Placement(3, 1, 4, "gpu07", "29500")),
        ("slurm", SLURM, 7, Placement(3, 1, 4, "gpu07", "7")),
        ("slurm", {**SLURM, "MASTER_PORT": "99"}, None, Placement(3, 1, 4, "gpu07", "99")),
        ("slurm", {**SLURM, "MASTER_ADDR": "here"}, None, Placement(3, 1, 4, "here", "29500")),
        ("mpi", MPI, None, Placement(2, 0, 4, "10.0.0.1", "29500")),
        ("mpi", {**MPI, "MASTER_PORT": "99"}, None, Placement(2, 0, 4, "10.0.0.1", "99")),
        ("mpi", MPI, "7", Placement(2, 0, 4, "10.0.0.1", "7")),
        # What another launcher left behind does not matter.
        ("mpi", {**TORCHRUN, **MPI, "MASTER_PORT": "1"}, None, Placement(2, 0, 4, "10.0.0.1", "1")),
    ],
)
def test_the_place_of_a_process_is_read_from_its_launchers_variables(launcher, environ, port, wanted):
    assert placement(launcher, environ, port) == wanted


@pytest.mark.parametrize(
    ("launcher", "environ"), [("pytorch", TORCHRUN), ("slurm", SLURM), ("mpi", MPI)], ids=lambda v: str(v)[:8]
)
def test_each_missing_variable_is_an_error_that_names_it_and_the_launcher(launcher, environ):
    for name in environ:
        for rest in ({k: v for k, v in environ.items() if k != name}, {**environ, name: ""}):
            with pytest.raises(
                DistributedError, match=rf"launcher '{launcher}' needs .* {name}, which is not set"
            ):
                placement(launcher, rest)


@pytest.mark.parametrize(
    ("launcher", "environ", "name"),
    [
        ("pytorch", TORCHRUN, "RANK"),
        ("pytorch", TORCHRUN, "LOCAL_RANK"),
        ("pytorch", TORCHRUN, "WORLD_SIZE"),
        ("pytorch", TORCHRUN, "MASTER_PORT"),
        ("slurm", SLURM, "SLURM_PROCID"),
        ("slurm", SLURM, "SLURM_NTASKS"),
        ("slurm", SLURM, "MASTER_PORT"),
        ("mpi", MPI, "OMPI_COMM_WORLD_SIZE"),
        ("mpi", MPI, "MASTER_PORT"),
    ],
)
@pytest.mark.parametrize("text", ["one", "-1", "1.5"])
def test_a_variable_that_is_no_number_is_an_error_that_names_it(launcher, environ, name, text):
    with pytest.raises(DistributedError, match=rf" {name} must be a number, not '{text}'"):
        placement(launcher, {**environ, name: text})


def test_an_unknown_launcher_is_an_error_that_names_the_nearest():
    with pytest.raises(DistributedError, match="unknown launcher 'slrum'; did you mean 'slurm'"):
        placement("slrum", {})


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n[01-03,7]", "n01"),
        ("n[7,01-03]", "n7"),
        ("gpu[1-2],cpu3", "gpu1"),
        ("cpu3,gpu[1-2]", "cpu3"),
        ("host1,host2", "host1"),
        ("host1", "host1"),
        ("a-b-[07-09]-x", "a-b-07-x"),
        ("a-b-[07-09]-x,c[1-2]", "a-b-07-x"),
        ("rack[1-2]n[3,5]", "rack1n3"),
        ("n1.cluster.org,n2.cluster.org", "n1.cluster.org"),
    ],
)
def test_the_first_host_of_a_node_list_is_found_without_scontrol(nodelist, first):
    assert first_host(nodelist) == first


def test_scontrol_is_believed_where_it_works(monkeypatch):
    monkeypatch.setattr(launch.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout="real7\nreal8\n"))
    assert first_host("n[1-2]") == "real7"

    def fail(*args, **kwargs):
        raise subprocess.CalledProcessError(1, "scontrol")

    monkeypatch.setattr(launch.subprocess, "run", fail)
    assert first_host("n[1-2]") == "n1"


@pytest.fixture
def joined(monkeypatch):
    """Records what would be joined; nothing is."""
    record = {}
    for name, value in MPI.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setattr(
        launch.dist, "init_process_group", lambda backend, **kwargs: record.update(kwargs, backend=backend)
    )
    return record


def test_the_variables_that_torch_reads_are_exported_whatever_the_launcher(joined):
    init_dist("mpi", timeout=90)
    assert (joined["rank"], joined["world_size"]) == (2, 4)
    assert joined["timeout"].total_seconds() == 90
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [launch.os.environ[name] for name in names] == ["2", "0", "4", "10.0.0.1", "29500"]


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
        ("cuda", None, "nccl"),
        ("npu", None, "hccl"),
        ("xpu", None, "xccl"),
        ("mps", None, "gloo"),
        ("cuda", "gloo", "gloo"),
    ],
)
def test_each_accelerator_has_its_backend_and_each_process_its_device(
    joined, monkeypatch, kind, given, backend
):
    chosen = []
    accelerator = SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    init_dist("mpi", backend=given)
    assert joined["backend"] == backend
    assert chosen == [1]
