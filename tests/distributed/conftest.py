"""Machines for launcher tests: this machine, two machines simulated with namespaces, and a Slurm cluster."""

import contextlib
import os
import shutil

import pytest
from cluster.machines import ROOT, NoMachines, environment, this_machine, two_machines
from cluster.slurm import PROGRAMS, slurm


def require_programs(packages, *programs):
    """Skip the test if programs are missing. In continuous integration, where they are installed, fail instead."""
    path = environment()["PATH"]
    if missing := [program for program in programs if shutil.which(program, path=path) is None]:
        how = pytest.fail if os.environ.get("SLIPSTREAM_CI") else pytest.skip
        how(f"requires {', '.join(missing)}: apt-get install --no-install-recommends {packages}")


@pytest.fixture
def folder(tmp_path):
    """A folder that contains only a symlink to the examples. After the test, the checkpoints in it are removed."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield tmp_path
    for work_dir in ("work_dirs", "work_dir", "faulty"):
        shutil.rmtree(tmp_path / work_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two machines with separate networks, keyed by their names n1 and n2."""
    require_programs("iproute2 util-linux", "ip", "unshare", "nsenter")
    with contextlib.ExitStack() as stack:
        try:
            both = stack.enter_context(two_machines(tmp_path_factory.mktemp("machines")))
        except NoMachines as error:  # without permission, the test is skipped, even in continuous integration
            pytest.skip(str(error))
        yield both


@pytest.fixture(scope="module")
def machine(request):
    """A machine with a separate network if possible; otherwise, this machine."""
    try:
        yield request.getfixturevalue("machines")["n1"]
    except pytest.skip.Exception:
        yield this_machine()


@pytest.fixture(scope="module")
def cluster(machines, tmp_path_factory):
    """The machine that submits jobs to a Slurm cluster of n1 and n2."""
    require_programs("munge slurmctld slurmd slurm-client", *PROGRAMS)
    with slurm(machines, tmp_path_factory.mktemp("slurm")) as login:
        yield login


@pytest.fixture(scope="module")
def mpi_machine(machines):
    """The machine n1. Skip the test if Open MPI or MPICH is not installed."""
    require_programs("openmpi-bin mpich", "mpirun", "mpiexec.hydra")
    return machines["n1"]
