"""Tests of srun, sbatch and `slipstream submit` on a Slurm cluster of two machines."""

import pytest
from cluster.evidence import FAILING, ended_by_rank_1, trained, words
from cluster.page import commands

pytestmark = pytest.mark.slow

SRUN, SUBMIT, BATCH = commands("Slurm")
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


def test_submit_trains_and_prints_the_paths(cluster, folder):
    said = words(cluster.run(SUBMIT, folder).succeeded())
    job = said.split("Submitted job ")[1].split(",")[0]
    cluster.run(f'until [ -z "$(squeue -h -j {job})" ]; do sleep 0.2; done; scontrol show job {job}', folder)
    work_dir = folder / "work_dirs/street_scenes_pp_lite_t"
    log = (work_dir / f"slurm-{job}.log").read_text()
    assert "Done: " in log, log
    assert (work_dir / "submit.sbatch").is_file()
    trained(folder, processes=4, steps=2)


@pytest.mark.exhaustive  # test_launch_submit.py also submits a batch file
def test_printed_batch_file_can_be_submitted(cluster, folder):
    cluster.run(BATCH, folder).succeeded()
    assert (folder / "job.sbatch").read_text().startswith("#!")
    trained(folder, processes=2, steps=4)


@pytest.mark.parametrize(
    ("how", "others"), [pytest.param("raise", "busy", marks=pytest.mark.exhaustive), ("kill", "away")]
)
def test_failing_rank_ends_the_job_under_srun(cluster, folder, how, others):
    run = cluster.run(f"srun -N2 --ntasks-per-node=1 python {FAILING} slurm {how} {others}", folder)
    ended_by_rank_1(run, how)
