"""Tests of `slipstream submit` with a job that is requeued during training, and with a job that fails."""

import shlex
import time

import pytest
import torch
from cluster.evidence import words

from faulty_fixtures import CONFIG, FOLDER

pytestmark = pytest.mark.slow


@pytest.fixture
def submit(cluster, folder):
    """Return a function that submits a run in which rank 1 fails or waits, and returns the job's id and log."""
    (folder / "line.yaml").write_text(CONFIG)

    def submit(how, work_dir):
        hook = shlex.quote(f"custom_hooks=[{{type: FailOnRank1, how: {how}, epoch: 2}}]")
        options = f"--trust --nodes 2 --requeue --time 10 --work-dir {shlex.quote(work_dir)}"
        command = f"slipstream submit line.yaml {hook} {options}"
        said = words(cluster.run(command, folder, PYTHONPATH=FOLDER).succeeded())
        job = said.split("Submitted job ")[1].split(",")[0]
        return job, folder / work_dir / f"slurm-{job}.log"

    return submit


def wait_for(text, log, within=60):
    end = time.monotonic() + within
    while not (log.is_file() and text in log.read_text()):
        assert time.monotonic() < end, log.read_text() if log.is_file() else "no log"
        time.sleep(0.1)


@pytest.mark.slow
def test_job_at_its_time_limit_is_requeued_and_completes(submit, cluster, folder):
    job, log = submit("wait", "50% of it's $x")
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
        torch.load(path / "epoch_3.pth", weights_only=True)["state_dict"]
        for path in (log.parent, folder / "whole")
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
