"""Tests of the batch script in examples/cluster with a job that is requeued during training, and one that fails."""

import shlex
import time

import pytest
import torch
from cluster.machines import ROOT

from faulty_fixtures import CONFIG, FOLDER

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "examples/cluster/slurm.sbatch"


@pytest.fixture
def submit(cluster, folder):
    """Return a function that submits a run in which rank 1 fails or waits, and returns the job's id and log."""
    (folder / "line.yaml").write_text(CONFIG)

    def submit(how, work_dir):
        hook = f"custom_hooks=[{{type: FailOnRank1, how: {how}, epoch: 2}}]"
        words = ["line.yaml", hook, "--trust", f"--work-dir={work_dir}"]
        options = "--parsable --nodes=2 --ntasks-per-node=1 --gpus-per-node=0 --cpus-per-task=1 --time=10"
        command = f"sbatch {options} {SCRIPT} {shlex.join(words)}"
        job = cluster.run(command, folder, PYTHONPATH=FOLDER).succeeded().output.split()[-1]
        return job, folder / f"slurm-{job}.log"

    return submit


def wait_for(text, log, within=60):
    end = time.monotonic() + within
    while not (log.is_file() and text in log.read_text()):
        assert time.monotonic() < end, log.read_text() if log.is_file() else "no log"
        time.sleep(0.1)


def test_job_at_its_time_limit_is_requeued_and_completes(submit, cluster, folder):
    job, log = submit("wait", "out")
    wait_for("waiting", log)
    # Slurm sends this signal two minutes before the time limit.
    cluster.run(f"scancel --batch --signal=USR1 {job}", folder).succeeded()
    wait_for("the state after iteration 5 was saved", log)
    whole = "slipstream train line.yaml --trust --nproc 2 --work-dir whole"
    cluster.run(whole, folder, PYTHONPATH=FOLDER).succeeded()
    wait_for("Done: ", log, within=200)
    # Rank 1 waited at the start of epoch 3. Both ranks received USR1 and stopped after one more step.
    assert "Resumed after epoch 2, iteration 5" in log.read_text()
    resumed, uninterrupted = (
        torch.load(folder / name / "epoch_3.pth", weights_only=True)["state_dict"]
        for name in ("out", "whole")
    )
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def test_job_fails_if_its_training_fails(submit, cluster, folder):
    job, log = submit("error", "failing")
    wait_for("sample 3 is broken", log)
    show = f"scontrol show job {job} | grep JobState"
    end = cluster.run(f"until {show} | grep -Ev 'RUNNING|COMPLETING'; do sleep 0.2; done", folder).succeeded()
    assert "JobState=FAILED" in end.output
    assert "Traceback" not in log.read_text()
