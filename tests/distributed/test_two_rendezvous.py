import os
import subprocess
import sys

import pytest
from ranks import job, run_jobs

from ports import free_port

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

JOIN = """
from slipstream import dist
dist.init_dist({launcher!r}, timeout=60, init_timeout={seconds})
print(dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_local_size())
"""
SLURM = dict(
    SLURM_PROCID=[0, 1, 2, 3],
    SLURM_LOCALID=[0, 1, 0, 1],
    SLURM_NODEID=[0, 0, 1, 1],
    SLURM_STEP_NUM_TASKS=4,
    SLURM_STEP_TASKS_PER_NODE="2(x2)",
    SLURM_STEP_ID=0,
    SLURM_JOB_ID=77,
    SLURM_STEP_NODELIST="n[1-2]",
)
MPI = dict(
    OMPI_COMM_WORLD_RANK=[0, 1],
    OMPI_COMM_WORLD_LOCAL_RANK=[0, 1],
    OMPI_COMM_WORLD_SIZE=2,
    OMPI_COMM_WORLD_LOCAL_SIZE=2,
)


def joins(world, launcher="pytorch", seconds=4, **environ):
    return job(JOIN.format(launcher=launcher, seconds=seconds), world, **environ)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    jobs = {
        "slurm": joins(4, "slurm", 30, **SLURM),
        "mpi": joins(2, "mpi", 30, **MPI, MASTER_ADDR=""),
        "missing": joins(2, "slurm", **{**SLURM, "SLURM_PROCID": [0, 2]}),
        "unreachable": joins(1, RANK=1, WORLD_SIZE=2),
        "beyond": joins(1, RANK=2, WORLD_SIZE=2),
    }
    return run_jobs(jobs, tmp_path_factory.mktemp("rendezvous"))


def test_slurm_tasks_connect_with_their_ranks(ended):
    assert [end.out for end in ended["slurm"]] == ["0 4 0 2\n", "1 4 1 2\n", "2 4 0 2\n", "3 4 1 2\n"]


def test_mpi_ranks_on_one_machine_need_no_master_addr(ended):
    assert [(end.out, end.err) for end in ended["mpi"]] == [("0 2 0 2\n", ""), ("1 2 1 2\n", "")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "the 4 processes could not connect to rank 0 at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
        ("unreachable", "the 2 processes could not connect to rank 0 at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
        ("beyond", "RANK=2 must be less than WORLD_SIZE=2"),
    ],
)
def test_error_of_a_missing_process_names_the_address(ended, name, message):
    assert all(end.status == 1 for end in ended[name])
    end = ended[name][0]
    assert f"slipstream.errors.DistributedError: {message}" in end.err


AGAIN = """
import os
import time
from slipstream import dist

dist.init_dist("pytorch", timeout=60, init_timeout=30)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and dist.get_rank() == 1:
    raise ValueError("the first attempt fails")
if attempt == 0:
    time.sleep(60)
with open(os.environ["ANSWERS"], "a") as answers:  # one write per rank, which keeps the lines intact
    answers.write(f"{dist.all_gather_object(dist.get_rank())}\\n")
"""


def test_rendezvous_succeeds_after_torchrun_restarts_the_processes(tmp_path):
    (tmp_path / "again.py").write_text(AGAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    # With these options, torchrun keeps one store across restarts, with the addresses of exited processes.
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(tmp_path / "again.py")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ANSWERS": str(tmp_path / "answers")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answers").read_text() == "[0, 1]\n[0, 1]\n"
    assert "ValueError: the first attempt fails" in done.stderr
