import os
import re
import socket
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # the owner of the port listens but does not respond
        jobs = {
            "slurm": joins(4, "slurm", 30, **SLURM),
            "mpi": joins(2, "mpi", 30, **MPI, MASTER_ADDR=""),
            "missing": joins(2, "slurm", **{**SLURM, "SLURM_PROCID": [0, 2]}),
            "unreachable": joins(1, RANK=1, WORLD_SIZE=2),
            "unresolved": joins(1, RANK=1, WORLD_SIZE=2, MASTER_ADDR="no-such-host.invalid"),
            "elsewhere": joins(1, RANK=0, WORLD_SIZE=2, MASTER_ADDR="no-such-host.invalid"),
            "taken": joins(1, RANK=0, WORLD_SIZE=2, MASTER_PORT=port),
            "silent": joins(1, seconds=1, RANK=1, WORLD_SIZE=2, MASTER_PORT=port),
            "beyond": joins(1, RANK=2, WORLD_SIZE=2),
            "twice": joins(3, seconds=30, RANK=[0, 1, 1]),
            "worlds": joins(2, seconds=30, WORLD_SIZE=[2, 3]),
        }
        return run_jobs(jobs, tmp_path_factory.mktemp("rendezvous"))


def last_line(end):
    assert end.status == 1, end
    return end.err.strip().splitlines()[-1].removeprefix("slipstream.errors.")


def test_slurm_tasks_connect_with_their_ranks(ended):
    assert [end.out for end in ended["slurm"]] == ["0 4 0 2\n", "1 4 1 2\n", "2 4 0 2\n", "3 4 1 2\n"]


def test_mpi_ranks_on_one_machine_need_no_master_addr(ended):
    assert [(end.out, end.err) for end in ended["mpi"]] == [("0 2 0 2\n", ""), ("1 2 1 2\n", "")]


def test_every_connected_rank_reports_the_missing_ranks_and_the_world_size_variable(ended):
    for end in ended["missing"]:
        wanted = (
            r"DistributedError: WORLD_SIZE=4 \(from SLURM_STEP_NUM_TASKS\), but only ranks 0, 2 connected to "
            r"MASTER_ADDR=127\.0\.0\.1, MASTER_PORT=\d+ within 4 s, and ranks 1, 3 did not; .*"
        )
        assert re.fullmatch(wanted, last_line(end))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unreachable", "could not connect to rank 0 at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
        ("unresolved", "MASTER_ADDR=no-such-host.invalid could not be resolved"),
        ("elsewhere", "MASTER_ADDR=no-such-host.invalid"),
        ("taken", "is in use on this machine"),
        ("silent", "the program listening at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
        ("beyond", "RANK=2 must be less than WORLD_SIZE=2"),
    ],
)
def test_rendezvous_error_names_the_wrong_variable(ended, name, message):
    (end,) = ended[name]
    line = last_line(end)
    assert line.startswith("DistributedError: ")
    assert message in line


def test_all_ranks_report_a_duplicate_rank(ended):
    for end in ended["twice"]:
        assert "rank 1 connected twice to MASTER_ADDR=127.0.0.1" in last_line(end)


def test_all_ranks_report_different_world_sizes(ended):
    for end in ended["worlds"]:
        line = "DistributedError: rank 0 has WORLD_SIZE=2, but rank 1 has WORLD_SIZE=3"
        assert last_line(end).startswith(line)


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
