"""Tests of srun on a Slurm cluster of two machines."""

import pytest
from cluster.evidence import FAILING, ended_by_rank_1, trained
from cluster.page import commands

pytestmark = pytest.mark.slow

(SRUN,) = commands("Slurm")
EXAMPLE = "python examples/distributed_training.py --launcher slurm --batches 2"


def test_documented_srun_command_trains_on_both_machines(cluster, folder):
    cluster.run(SRUN, folder).succeeded()
    trained(folder, processes=4, steps=10)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            "-N2 --ntasks-per-node=1", marks=pytest.mark.exhaustive
        ),  # the documented command also uses two machines
        "-N1 --ntasks-per-node=2",
    ],
)
def test_srun_starts_two_processes_on_one_or_two_machines(cluster, folder, shape):
    cluster.run(f"srun {shape} {EXAMPLE}", folder).succeeded()
    trained(folder, processes=2, steps=2)


@pytest.mark.parametrize(
    ("how", "others"), [pytest.param("raise", "busy", marks=pytest.mark.exhaustive), ("kill", "away")]
)
def test_failing_rank_ends_the_job_under_srun(cluster, folder, how, others):
    run = cluster.run(f"srun -N2 --ntasks-per-node=1 python {FAILING} slurm {how} {others}", folder)
    ended_by_rank_1(run, how)
