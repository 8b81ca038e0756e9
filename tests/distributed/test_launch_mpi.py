"""Tests of the commands in docs/distributed.md for Open MPI's mpirun and MPICH's mpiexec."""

import pytest
from cluster.evidence import FAILING, ended_by_rank_1, trained
from cluster.page import commands

pytestmark = pytest.mark.slow

OPEN_MPI, MPICH = "mpirun -np 2", "mpiexec.hydra -n 2"
# Open MPI 4 and 5 require these variables to run as root, and to run two processes on one core.
AS_HERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            text, id=text.split()[0], marks=pytest.mark.exhaustive if text.startswith("mpiexec.hydra") else ()
        )
        for text in commands("MPI")
    ],
)
def test_documented_command_trains_in_two_processes(mpi_machine, folder, command):
    mpi_machine.run(command, folder, **AS_HERE).succeeded()
    trained(folder, processes=2, steps=20)


@pytest.mark.parametrize(
    ("how", "others", "starter"),
    [
        pytest.param("raise", "busy", OPEN_MPI, marks=pytest.mark.exhaustive, id="raise-busy-mpirun"),
        pytest.param("kill", "away", OPEN_MPI, id="kill-away-mpirun"),
        pytest.param("raise", "busy", MPICH, id="raise-busy-mpiexec.hydra"),
        pytest.param("kill", "away", MPICH, marks=pytest.mark.exhaustive, id="kill-away-mpiexec.hydra"),
    ],
)
def test_failing_rank_ends_the_job(mpi_machine, folder, how, others, starter):
    run = mpi_machine.run(f"{starter} python {FAILING} mpi {how} {others}", folder, **AS_HERE)
    ended_by_rank_1(run, how)
