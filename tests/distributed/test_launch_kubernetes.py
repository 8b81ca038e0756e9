"""Tests of the Kubernetes commands in docs/distributed.md. The commands of two pods run on this machine."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from cluster.page import commands

from faulty_fixtures import CONFIG, FOLDER
from kubernetes_schema import faults
from ports import free_port
from slipstream.cli.parser import parse
from slipstream.cli.submit_kubernetes import manifest

pytestmark = pytest.mark.slow

WAITING = "custom_hooks=[{type: FailOnRank1, how: wait, epoch: 2}]"
PODS = (("Master", 0), ("Worker", 1))


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the pods of a job with the variables that the operator sets."""
    (tmp_path / "line.yaml").write_text(CONFIG)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    started = []

    def start_pod(job, kind, rank, port, **environ):
        (container,) = job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]["containers"]
        log = (tmp_path / f"{kind}.log").open("a")
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        place = dict(
            PET_NNODES="2", PET_NODE_RANK=str(rank), PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=port
        )
        other = dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        own = {variable["name"]: variable["value"] for variable in container["env"]}
        search = f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}"
        variables = {**os.environ, **own, **place, **other, **environ, "PATH": path, "PYTHONPATH": search}
        pod = subprocess.Popen(
            container["command"], cwd=tmp_path, env=variables, stdout=log, stderr=log, start_new_session=True
        )
        started.append(pod)
        return pod

    def start_all(job, **environ):
        port = str(free_port())
        return [start_pod(job, kind, rank, port, **environ) for kind, rank in PODS]

    yield start_all
    for pod in started:
        if pod.poll() is None:
            os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()


def two_pods(tmp_path, *overrides):
    options = ["--trust", "--nodes", "2", "--image", "x", "--volume", f"runs:{tmp_path}"]
    args = parse(["submit", "line.yaml", "--to", "kubernetes", *options, *overrides])
    return yaml.safe_load(manifest(args, "out"))


def wait_for(text, log, within=100):
    end = time.monotonic() + within
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_documented_commands_write_valid_manifests(folder):
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}  # noqa: PTH120
    for command in commands("Kubernetes"):
        subprocess.run(["bash", "-ec", command], cwd=folder, env=environ, check=True, timeout=200)
    job, train_job = (yaml.safe_load((folder / name).read_text()) for name in ("job.yaml", "train_job.yaml"))
    assert faults(job) == faults(train_job) == []
    assert train_job["spec"]["trainer"]["numNodes"] == 2
    assert [spec["replicas"] for spec in job["spec"]["pytorchReplicaSpecs"].values()] == [1, 1]


def test_evicted_pod_stops_all_pods_which_then_resume(start, tmp_path):
    job = two_pods(tmp_path, WAITING)
    pods = start(job)
    wait_for("waiting", tmp_path / "Worker.log")
    pods[1].send_signal(signal.SIGTERM)  # as when a node is drained
    # The operator restarts a pod only if its status is above 127.
    assert [pod.wait(100) for pod in pods] == [143, 143], "a pod did not exit with status 143"
    assert (tmp_path / "out/preempted.pth").is_file()
    again = start(job, SLURM_RESTART_COUNT="1")  # the hook does not wait again
    assert [pod.wait(200) for pod in again] == [0, 0], (tmp_path / "Master.log").read_text()
    assert "Resumed after epoch 2, iteration 5" in (tmp_path / "Master.log").read_text()
    whole = [
        sys.executable,
        "-m",
        "slipstream",
        "train",
        "line.yaml",
        "--trust",
        "--nproc=2",
        "--work-dir=whole",
    ]
    search = f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}"
    subprocess.run(whole, cwd=tmp_path, env={**os.environ, "PYTHONPATH": search}, check=True, timeout=200)
    resumed, uninterrupted = (
        torch.load(tmp_path / name / "epoch_3.pth", weights_only=True)["state_dict"]
        for name in ("out", "whole")
    )
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def test_error_in_one_pod_ends_all_pods_without_a_restart(start, tmp_path):
    pods = start(two_pods(tmp_path, WAITING.replace("wait", "error")))
    statuses = [pod.wait(200) for pod in pods]
    assert all(0 < status < 128 for status in statuses), (tmp_path / "Master.log").read_text()
    assert "sample 3 is broken" in (tmp_path / "Worker.log").read_text()
