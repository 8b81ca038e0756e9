"""`slipstream submit` with a job that is requeued during training, and a job that fails."""

import shlex
import time

import pytest
import torch
from cluster.evidence import words

from faulty_fixtures import CONFIG, FOLDER

pytestmark = pytest.mark.slow


@pytest.fixture
def submit(cluster, folder):
    """Submit a training run that fails on rank 1; return the id and the log of the job."""
    (folder / "line.yaml").write_text(CONFIG)

    def submit(how, work_dir):
        hook = shlex.quote(f"custom_hooks=[{{type: Stumble, how: {how}, epoch: 2}}]")
        command = f"slipstream submit line.yaml {hook} --nodes 2 --requeue --time 10 --work-dir {shlex.quote(work_dir)}"
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
    # Slurm sends this signal two minutes before the limit.
    cluster.run(f"scancel --batch --signal=USR1 {job}", folder).succeeded()
    wait_for("DUE TO JOB REQUEUE", log)
    whole = "slipstream train line.yaml --nproc 2 --work-dir whole"
    cluster.run(whole, folder, PYTHONPATH=FOLDER).succeeded()
    wait_for("Done: ", log, within=200)
    assert "Resumed at epoch 2, iteration 4" in log.read_text()
    resumed, uninterrupted = (
        torch.load(path / "epoch_3.pth", weights_only=True)["state_dict"]
        for path in (log.parent, folder / "whole")
    )
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def test_job_with_a_failing_training_fails(submit, cluster, folder):
    job, log = submit("error", "failing")
    wait_for("sample 3 is broken", log)
    show = f"scontrol show job {job} | grep JobState"
    end = cluster.run(f"until {show} | grep -Ev 'RUNNING|COMPLETING'; do sleep 0.2; done", folder).succeeded()
    assert "JobState=FAILED" in end.output
    assert "Traceback" not in log.read_text()
