import pytest

from slipstream.dist.placement import Placement, infer_launcher, read_placement
from slipstream.errors import DistributedError

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1202061313",
    "PMIX_RANK": "2",
    "MASTER_ADDR": "10.0.0.1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}

# Task environments in Slurm 22.05, reduced to the variables that Slipstream reads. The expected port is
# 20000 + (8 * job + step) % 10000.
SBATCH_SRUN = {  # sbatch -N3 --ntasks-per-node=2, srun
    "SLURM_JOB_ID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}
STEP_ON_ONE_NODE = {  # the same job, srun -N1 -n1 -w n3
    **SBATCH_SRUN,
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NODELIST": "n3",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
SRUN_ALONE = {  # srun -N2 --ntasks=4, the last task
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "3,1",
}
SALLOC_SRUN = {  # salloc -N2 -n2, srun
    **SRUN_ALONE,
    "SLURM_JOB_ID": "4",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
HETEROGENEOUS = {  # sbatch -N1 -n1 : -N2 -n2, srun --het-group=0,1
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NTASKS_HET_GROUP_1": "2",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
OLD_SLURM = {  # without the node list and task counts of the step
    "SLURM_JOB_ID": "1251",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "gpu[07-08]",
}
BATCH_SCRIPT = {  # the same job as SBATCH_SRUN, outside any step
    "SLURM_JOB_ID": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}
SALLOC_SHELL = {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("launcher", "environ", "port", "wanted"),
    [
        ("pytorch", TORCHRUN, None, Placement(5, 1, 8, "node0", "1234")),
        ("pytorch", {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, None, Placement(5, 1, 8, "node0", "1234", 2)),
        ("pytorch", TORCHRUN, 7, Placement(5, 1, 8, "node0", "7")),
        ("slurm", SBATCH_SRUN, None, Placement(5, 1, 6, "n1", "20024", 2)),
        ("slurm", STEP_ON_ONE_NODE, None, Placement(0, 0, 1, "n3", "20026", 1)),
        ("slurm", SRUN_ALONE, None, Placement(3, 0, 4, "n1", "20016", 1)),
        ("slurm", {**SRUN_ALONE, "SLURM_NODEID": "0"}, None, Placement(3, 0, 4, "n1", "20016", 3)),
        ("slurm", SALLOC_SRUN, None, Placement(1, 0, 2, "n1", "20032", 1)),
        ("slurm", HETEROGENEOUS, None, Placement(2, 0, 3, "n1", "20040", 1)),
        ("slurm", OLD_SLURM, None, Placement(3, 1, 4, "gpu07", "20009")),
        ("slurm", {**BATCH_SCRIPT, "SLURM_NTASKS": "1"}, None, Placement(0, 0, 1, "n1", "20024", 2)),
        ("slurm", OLD_SLURM, 7, Placement(3, 1, 4, "gpu07", "7")),
        ("slurm", {**OLD_SLURM, "MASTER_PORT": "99"}, None, Placement(3, 1, 4, "gpu07", "99")),
        ("slurm", {**OLD_SLURM, "MASTER_ADDR": "here"}, None, Placement(3, 1, 4, "here", "20009")),
        ("mpi", {**OPEN_MPI, "MASTER_PORT": "99"}, None, Placement(2, 0, 4, "10.0.0.1", "99", 2)),
        ("mpi", OPEN_MPI, "7", Placement(2, 0, 4, "10.0.0.1", "7", 2)),
        ("mpi", MVAPICH, None, Placement(1, 1, 2, "127.0.0.1", "29500", 2)),
        ("mpi", HYDRA, None, Placement(1, 1, 2, "127.0.0.1", "29500", 2)),
        ("mpi", {**HYDRA, "MASTER_ADDR": "h"}, None, Placement(1, 1, 2, "h", "29500", 2)),
        # Variables of other launchers are ignored.
        ("mpi", {**TORCHRUN, **HYDRA, "MASTER_PORT": "1"}, None, Placement(1, 1, 2, "node0", "1", 2)),
    ],
)
def test_placement_is_read_from_the_launchers_variables(launcher, environ, port, wanted):
    assert read_placement(launcher, environ, port) == wanted


@pytest.mark.parametrize("environ", [BATCH_SCRIPT, SALLOC_SHELL], ids=["batch script", "salloc"])
def test_slurm_job_without_srun_raises_an_error(environ):
    with pytest.raises(DistributedError, match=r"SLURM_NTASKS=[26], but SLURM_STEP_ID is not set.* srun"):
        read_placement("slurm", environ)


def test_jobs_and_steps_on_one_node_have_different_ports():
    def port(job, step):
        return int(
            read_placement(
                "slurm", {**OLD_SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            ).master_port
        )

    ports = [port(job, step) for job in range(900_000, 901_000) for step in range(8)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20000
    assert max(ports) < 30000


def test_open_mpi_jobs_have_different_ports_that_are_equal_on_all_ranks():
    def port(**more):
        return read_placement("mpi", {**OPEN_MPI, **more}).master_port

    assert port() == port(OMPI_COMM_WORLD_RANK="1", PMIX_RANK="1")
    assert port() != port(PMIX_NAMESPACE="1202061314")
    assert 20000 <= int(port(PMIX_NAMESPACE="prterun-host-71@1")) < 30000


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, "none"),
        (TORCHRUN, "pytorch"),
        (SBATCH_SRUN, "slurm"),
        (BATCH_SCRIPT, "none"),
        (SALLOC_SHELL, "none"),
        (OPEN_MPI, "mpi"),
        (MVAPICH, "mpi"),
        (HYDRA, "mpi"),
        ({**SBATCH_SRUN, **OPEN_MPI}, "mpi"),  # mpirun in a Slurm job
        ({**SBATCH_SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}, "slurm"),  # srun --mpi=pmi2
        ({**SBATCH_SRUN, **TORCHRUN}, "pytorch"),  # torchrun in each task
    ],
)
def test_launcher_is_inferred_from_its_variables(environ, launcher):
    assert infer_launcher(environ) == launcher
