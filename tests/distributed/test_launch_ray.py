"""Tests of `slipstream submit --to ray` on a Ray cluster of two machines."""

import os
import shlex
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cluster.evidence import trained
from cluster.page import commands
from cluster.ray_nodes import ray_cluster

from faulty_fixtures import CONFIG, FOLDER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="requires Ray: pip install 'slipstream[ray]'"),
]

SUBMIT = "exec slipstream submit line.yaml --to ray --trust"
SHOW_GPUS = """\
import os
from slipstream.hooks import Hook
from slipstream.registry import HOOKS

@HOOKS.register_module()
class ShowGpus(Hook):
    def before_train(self, runner):
        print(f"rank {runner.rank} sees GPUs '{os.environ['CUDA_VISIBLE_DEVICES']}'", flush=True)
"""


@pytest.fixture(scope="module")
def nodes(machines, tmp_path_factory):
    with ray_cluster(machines, tmp_path_factory.mktemp("ray"), PYTHONPATH=FOLDER) as found:
        yield found


@pytest.fixture
def folder(folder):
    (folder / "line.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def expected(nodes, tmp_path_factory):
    """The weights after an uninterrupted run with two processes, without Ray."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "line.yaml").write_text(CONFIG)
    nodes["n1"].run("slipstream train line.yaml --trust --nproc 2 --work-dir out", folder).succeeded()
    return weights(folder / "out")


def weights(work_dir):
    return torch.load(work_dir / "epoch_3.pth", weights_only=True)["state_dict"]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def on_rank_1(how):
    return shlex.quote(f"custom_hooks=[{{type: FailOnRank1, how: {how}, epoch: 2}}]")


def wait_for(text, run, within=100):
    end = time.monotonic() + within
    while text not in run.output:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < end, run.output
        time.sleep(0.1)


def send(number, run):
    """Send a signal to the command, which is the only child of the run's process, nsenter."""
    pid = run.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(child), number)


def ended(nodes, folder, within=60):
    """Check that all training processes on the nodes exit within `within` seconds."""
    for node in nodes.values():
        # The pattern does not match the shell that runs this command.
        command = "while pgrep -fa '[s]lipstream train line.yaml'; do sleep 0.5; done"
        node.run(command, folder, timeout=within).succeeded()


def error(run):
    (line,) = [line for line in run.output.splitlines() if "error: the training processes" in line]
    return line


def test_documented_command_trains_on_both_nodes(nodes, folder):
    (command,) = commands("Ray")
    nodes["n1"].run(command, folder, timeout=200).succeeded()
    trained(folder, processes=4, steps=2)


def test_one_process_on_each_node_computes_the_same_as_two_local_processes(nodes, folder, expected):
    run = nodes["n2"].run(f"{SUBMIT} --nodes 2 --work-dir out", folder).succeeded()
    assert "world_size 2" in run.output
    assert run.output.count("Done: ") == 1, run.output
    assert_equal(weights(folder / "out"), expected)


def test_interrupted_job_saves_its_state_and_resumes(nodes, folder, expected):
    submit = f"{SUBMIT} --tasks-per-node 2 --work-dir out"
    with nodes["n1"].running(f"{submit} {on_rank_1('wait')}", folder) as run:
        wait_for("waiting", run)
        send(signal.SIGINT, run)
        assert run.wait().process.returncode == 75, run.output
    assert (folder / "out/preempted.pth").is_file()
    again = nodes["n1"].run(submit, folder).succeeded()
    assert "Resumed after epoch 2, iteration 5" in again.output
    assert_equal(weights(folder / "out"), expected)


def test_second_signal_ends_the_job_immediately(nodes, folder):
    with nodes["n1"].running(
        f"{SUBMIT} --tasks-per-node 2 --work-dir out {on_rank_1('wait')}", folder
    ) as run:
        wait_for("waiting", run)
        send(signal.SIGINT, run)
        wait_for("training will stop within the next few steps", run)
        send(signal.SIGINT, run)
        assert run.wait().process.returncode == 130, run.output
    ended(nodes, folder)
    assert not (folder / "out/preempted.pth").exists(), "the state was saved although rank 1 was waiting"


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [("kill", 137, "rank 1 (pid "), ("error", 1, "slipstream: error: sample 3 is broken")],
)
def test_failure_of_one_process_ends_the_job_with_its_status(nodes, folder, how, status, message):
    run = nodes["n1"].run(f"{SUBMIT} --tasks-per-node 2 {on_rank_1(how)}", folder)
    assert run.process.returncode == status, run.output
    assert message in run.output
    assert f"exited with status {status}; see the messages above" in error(run)
    ended(nodes, folder)


def test_failure_on_one_node_ends_the_processes_of_the_other_node(nodes, folder):
    run = nodes["n1"].run(f"{SUBMIT} --nodes 2 {on_rank_1('kill')}", folder).failed()
    assert "(one of 2 nodes) exited with status " in error(run)
    assert "Traceback" not in run.output
    ended(nodes, folder)


@pytest.mark.parametrize("killed", ["actor", "command"])
def test_training_ends_if_an_actor_or_the_command_is_killed(nodes, folder, killed):
    submit = f"{SUBMIT} --tasks-per-node 2 --work-dir out {on_rank_1('wait')}"
    with nodes["n1"].running(submit, folder) as run:
        wait_for("waiting", run)
        if killed == "actor":
            nodes["n1"].run("kill -KILL $(pgrep -f '^ray::Node')", folder)
            nodes["n2"].run("kill -KILL $(pgrep -f '^ray::Node')", folder)
        else:
            send(signal.SIGKILL, run)
        run.wait().failed()
    if killed == "actor":
        assert " failed: The actor is dead" in error(run)
    ended(nodes, folder)
    assert not (folder / "out/epoch_3.pth").exists(), "the processes continued"


def test_processes_use_the_gpus_that_ray_assigns_and_the_variables_of_the_command(nodes, folder):
    (folder / "gpus.py").write_text(SHOW_GPUS)
    (folder / "line.yaml").write_text(CONFIG.replace("[faulty_fixtures]", "[faulty_fixtures, gpus]"))
    search = f"{FOLDER}:{folder}"  # the nodes cannot import gpus.py without --env
    options = f"train_cfg.max_epochs=1 'custom_hooks=[{{type: ShowGpus}}]' --env PYTHONPATH={search}"
    for resources, seen in (("--gpus-per-node 2", "0,1"), ("--tasks-per-node 2", "")):
        command = f"{SUBMIT} {resources} {options} --work-dir out{len(seen)}"
        run = nodes["n1"].run(command, folder, PYTHONPATH=search).succeeded()
        assert all(f"rank {rank} sees GPUs '{seen}'" in run.output for rank in (0, 1)), run.output


def test_job_waits_for_nodes_until_it_is_interrupted(nodes, folder):
    with nodes["n1"].running(f"{SUBMIT} --nodes 3", folder) as run:
        wait_for("waiting for 3 x (1 CPU); total resources of each node: 8 CPU; 8 CPU", run)
        send(signal.SIGINT, run)
        assert run.wait().process.returncode == 130, run.output
    assert "interrupted; all written files are complete" in run.output


def test_node_that_cannot_start_ends_the_processes_that_wait_for_it(nodes, folder):
    only_on_n2 = "mount -t tmpfs tmpfs /mnt && mkdir /mnt/x && cp line.yaml /mnt/x && cd /mnt/x"
    run = nodes["n2"].run(f"{only_on_n2} && {SUBMIT} --nodes 2", folder).failed()
    assert (
        "the node 10.77.0.1 (one of 2 nodes) failed: the folder /mnt/x does not exist on this node"
        in error(run)
    )
    ended(nodes, folder)


def test_unreachable_cluster_is_reported(nodes, folder):
    run = nodes["n1"].run(f"{SUBMIT} --address 10.77.0.2:1", folder).failed()
    assert "cannot connect to a Ray cluster at 10.77.0.2:1 ([Errno 111] Connection refused)" in run.output
    assert len(run.output.splitlines()) == 1, run.output
