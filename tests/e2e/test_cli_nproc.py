"""Tests of `--nproc`: output, failures and termination of the processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from faulty_fixtures import CONFIG, FOLDER
from slipstream.cli.configure import command_args
from slipstream.cli.parser import parse
from slipstream.cores import cores

pytestmark = pytest.mark.slow  # most of the tests start several processes


def failing_hook(how, epoch=1):
    return f"custom_hooks=[{{type: FailOnRank1, how: {how}, epoch: {epoch}}}]"


@pytest.fixture(autouse=True)
def _config(tmp_path, monkeypatch):
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.setenv("PYTHONPATH", FOLDER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the output and the work_dir of an uninterrupted run in two processes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "line.yaml").write_text(CONFIG)
    environ = dict(os.environ, PYTHONPATH=FOLDER)
    environ.pop("OMP_NUM_THREADS")
    arguments = ["train", "line.yaml", "--trust", "--nproc", "2", "experiment_name=costs-$local_rank"]
    command = [sys.executable, "-m", "slipstream", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done, folder / "work_dirs/line"


def weights(work_dir):
    return torch.load(work_dir / "epoch_3.pth", weights_only=True)["state_dict"]


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_two_processes_print_the_output_of_one_process(trained):
    done, _ = trained
    assert "world_size 2" in done.stdout
    assert done.stdout.count("Done: ") == 1
    assert done.stdout.count("Saved checkpoint epoch_3.pth") == 1
    assert done.stderr == ""
    assert re.search(r"Trained for 6 steps", done.stdout), (
        "the run did not take 6 steps: 3 epochs of 8 samples, in 2 processes with a batch size of 2"
    )


def test_cores_are_divided_among_the_processes(trained):
    assert f"cpu_threads {max(1, cores() // 2)}," in trained[0].stdout


def test_arguments_are_passed_to_the_processes_unchanged(trained):
    (config,) = trained[1].glob("line*")
    assert "costs-$local_rank" in config.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "r", "a=1", "b=$x"],
        ["train", "r", "--work-dir=-odd dir", "--resume"],
        ["train", "r", "a=[1, 2]", "--resume=x.pth", "--launcher=slurm"],
        ["val", "r", "a='1'", "--checkpoint=x.pth"],
        ["train", "r", "--trust"],
    ],
)
def test_rebuilt_arguments_are_parsed_to_the_same_values(arguments):
    args = parse(arguments)
    assert parse(command_args(args)) == args


def test_overrides_are_accepted_after_an_option():
    assert parse(["train", "r", "a=1", "--nproc", "2", "b=2"]).overrides == ["a=1", "b=2"]


@pytest.mark.parametrize("epoch", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_restarted_run_ignores_old_checkpoints_and_matches_an_uninterrupted_one(
    slipstream, trained, tmp_path, epoch
):
    shutil.copytree(trained[1], tmp_path / "again")
    last = tmp_path / "again/epoch_3.pth"
    last.unlink()  # the comparison must not read the old checkpoint
    arguments = [
        "train",
        "line.yaml",
        "--trust",
        failing_hook("kill", epoch),
        "--nproc=2",
        "--max-restarts=1",
        "--work-dir=again",
    ]
    done = slipstream(*arguments)
    assert "a process failed; restart 1 of 1" in done.stderr
    assert ("Resumed after epoch 2" in done.stdout) == (epoch == 2)
    same(weights(tmp_path / "again"), weights(trained[1]))


@pytest.mark.parametrize(
    ("how", "status", "first", "last"),
    [
        ("error", 1, "slipstream: error: sample 3 is broken", "sample 3 is broken"),
        ("bug", 1, "[rank1]: Traceback", "rank 1 of 2"),
        pytest.param(
            *("leave", 7, "slipstream: ", "slipstream: error: rank 1 exited with status 7"),
            marks=pytest.mark.exhaustive,
        ),
        (
            "kill",
            137,
            "slipstream: ",
            "was killed by SIGKILL, possibly because the machine ran out of memory",
        ),
    ],
)
def test_first_failed_process_ends_the_command_and_is_reported(slipstream, how, status, first, last):
    began = time.monotonic()
    done = slipstream("train", "line.yaml", "--trust", failing_hook(how), "--nproc", "2", status=status)
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith(first), done.stderr
    assert last in lines[-1]
    assert done.stderr.count("Traceback") == (how == "bug")
    assert "[rank0]" not in done.stderr
    assert time.monotonic() - began < 120


def test_invalid_configuration_prints_one_line_and_exits_with_status_2(slipstream):
    done = slipstream("train", "line.yaml", "--trust", "model.type=Lime", "--nproc", "2", status=2)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "did you mean 'Line'" in done.stderr


def test_val_in_several_processes_prints_metrics_once(slipstream, command):
    from test_cli_train import SMALL

    recipe = "street_scenes_pp_lite_t"
    command("train", recipe, *SMALL, "train_cfg.max_epochs=1", "--work-dir", "net")
    alone = command("val", recipe, *SMALL, "--work-dir", "net").out.splitlines()[-1]
    both = slipstream("val", recipe, *SMALL, "--work-dir", "net", "--nproc", "2").stdout.splitlines()
    assert both[-1].startswith("aAcc")
    assert both[-1] == alone
    assert sum(line.startswith("aAcc") for line in both) == 1


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="requires /proc")
@pytest.mark.parametrize(
    ("number", "status", "epoch"),
    [
        pytest.param("SIGINT", 75, 1, marks=pytest.mark.exhaustive),
        ("SIGTERM", 75, 1),
        ("SIGTERM", 75, -1),
        ("SIGKILL", -9, 1),
    ],
)
def test_signal_terminates_all_processes(tmp_path, number, status, epoch):
    arguments = ["train", "line.yaml", "--trust", failing_hook("wait", epoch), "--nproc", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "slipstream", *arguments],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # a killed launcher does not remove its temporary folder
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert any("waiting" in line for line in process.stdout), process.stderr.read()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 2
            process.send_signal(signal.Signals[number])
            assert process.wait(60) == status
            said = process.stderr.read().strip().splitlines()
        finally:
            process.kill()
    end = time.monotonic() + 30
    while alive := [pid for pid in children if _alive(pid)]:
        assert time.monotonic() < end, f"{alive} of the processes {children} are still running"
        time.sleep(0.05)
    saved = Path(tmp_path, "work_dirs", "line", "preempted.pth")
    if epoch == 1:
        assert saved.is_file() == (status == 75)
    if number == "SIGKILL":  # torch may log that the connection to the launcher was lost
        assert not any("Traceback" in line for line in said), said
    else:
        own = [
            line for line in said if line and "torch/distributed/elastic" not in line
        ]  # torchrun's own log
        assert all(" received: training will stop" in line for line in own), said
