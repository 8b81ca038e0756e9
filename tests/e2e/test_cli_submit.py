"""Tests of `slipstream submit` with a script that replaces sbatch. tests/distributed uses a real Slurm cluster."""

import shlex
import sys
from pathlib import Path

import pytest

from slipstream.cli.parser import parse
from slipstream.cli.submit import batch_file

RECIPE = "street_scenes_pp_lite_t"


def text(*arguments, work_dir=Path("/data/runs/x")):
    return batch_file(parse(["submit", RECIPE, *arguments]), work_dir)


def options(text):
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return dict(shlex.split(line)[0].removeprefix("--").partition("=")[::2] for line in lines)


def command(text):
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return shlex.split(line.removesuffix(" &"))


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Return a function that replaces sbatch with a shell script. Until it is called, there is no sbatch."""
    (tmp_path / "bin").mkdir()

    def replace(script):
        (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/sbatch").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return replace


def test_each_gpu_has_a_process_and_each_option_has_a_line():
    arguments = (
        "--nodes 2 --gpus-per-node 8 --partition mm_dev --time 4:00:00 --account me --qos high --mem 64G"
    )
    found = options(text(*arguments.split()))
    assert found["nodes"] == "2"
    assert found["gpus-per-node"] == "8"
    assert found["ntasks-per-node"] == "8"
    assert found["partition"] == "mm_dev"
    assert found["time"] == "4:00:00"
    assert (found["account"], found["qos"], found["mem"]) == ("me", "high", "64G")
    assert found["job-name"] == RECIPE
    assert options(text("--gpus-per-node", "a100:4"))["ntasks-per-node"] == "4"


def test_tasks_per_node_sets_the_number_of_processes_without_gpus():
    found = options(text("--tasks-per-node", "3", "--cpus-per-task", "2"))
    assert found["ntasks-per-node"] == "3"
    assert not any(name.startswith("gpu") for name in found)
    assert "--cpus-per-task=2" in command(text("--cpus-per-task", "2")), (
        "srun lacks --cpus-per-task, which it does not inherit from the job"
    )


def test_command_is_quoted_for_the_shell():
    odd = ["randomness.seed=1", 'experiment_name=it\'s $HOME `x` "y" & z', "val_cfg={a: [1, 2]}"]
    work_dir = Path("/data/100% mine/$x")
    arguments = command(text(*odd, work_dir=work_dir))
    start = arguments.index("train")
    assert arguments[:start] == ["srun", "--kill-on-bad-exit=1", sys.executable, "-m", "slipstream"]
    args = parse(arguments[start:])
    assert (args.config, args.overrides, args.work_dir) == (RECIPE, odd, str(work_dir))
    assert (args.launcher, args.resume) == ("slurm", True)


def test_sbatch_values_are_quoted_and_percent_signs_escaped():
    found = options(text("--job-name", "my job's #1", work_dir=Path("/data/100% mine")))
    assert found["job-name"] == "my job's #1"
    assert found["output"] == "/data/100%% mine/slurm-%j.log"
    assert found["chdir"] == str(Path.cwd())


def test_requeue_happens_before_the_time_limit():
    again, once = text("--requeue"), text()
    assert "requeue" in options(again)
    assert options(again)["signal"].startswith("B:USR1@")
    assert "trap stop USR1" in again
    assert 'scontrol requeue "$SLURM_JOB_ID"' in again
    assert "requeue" not in options(once)
    assert "trap" not in once
    assert {options(file)["open-mode"] for file in (again, once)} == {"append"}, (
        "a requeued job would overwrite its log; Slurm can requeue a job even without --requeue"
    )


def test_other_options_are_passed_to_sbatch_unchanged():
    found = text("--sbatch=--constraint=a100", "--sbatch", "exclusive")
    assert "#SBATCH --constraint=a100\n#SBATCH --exclusive\n" in found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "0"], "--nodes: '0'"),
        (["--nodes", "two"], "--nodes: 'two'"),
        (["--gpus-per-node", "0"], "--tasks-per-node"),
        (["--gpus-per-node", "8", "--tasks-per-node", "2"], "not allowed with"),
        (["--time", "4h"], "--time: '4h' is not a Slurm time limit"),
        (["--time", "1:2:3:4"], "--time"),
        (["--job-name", "a\n#SBATCH --uid=0"], "--job-name"),
        (["--partition", ""], "--partition"),
        (["train_cfg.max_epoch=3"], "did you mean 'train_cfg.max_epochs'"),
        (["--work-dir", "a\nb"], "line breaks"),
    ],
)
def test_invalid_argument_raises_an_error_before_submission(
    slipstream, sbatch, tmp_path, arguments, expected
):
    sbatch(": > submitted; echo 1")
    done = slipstream("submit", RECIPE, *arguments, status=2)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "submitted").exists()
    assert not (tmp_path / "work_dirs").exists()


@pytest.mark.parametrize("time", ["30", "30:00", "4:00:00", "2-0", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_each_form_of_slurm_time_limit_is_accepted(time):
    assert options(text("--time", time))["time"] == time


def test_submit_writes_the_script_and_prints_the_job_id(slipstream, sbatch, tmp_path):
    sbatch('echo "$@" > arguments; echo "17;cluster"')
    done = slipstream("submit", RECIPE, "--nodes", "2")
    path = tmp_path / "work_dirs" / RECIPE / "submit.sbatch"
    assert done.stdout.startswith("Submitted job 17, which will start from scratch.")
    assert f"{path.parent}/slurm-17.log" in done.stdout
    assert (tmp_path / "arguments").read_text().split() == ["--parsable", str(path)]
    assert options(path.read_text())["nodes"] == "2"


def test_submit_prints_the_checkpoint_to_resume_from(slipstream, sbatch, tmp_path):
    sbatch("echo 18")
    checkpoint = tmp_path / "out/epoch_4.pth"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    (tmp_path / "out/last_checkpoint").write_text(str(checkpoint))
    done = slipstream("submit", RECIPE, "--work-dir", "out")
    assert f"Submitted job 18, which will resume from {checkpoint}." in done.stdout


def test_dry_run_prints_the_script_without_submitting(slipstream, sbatch, tmp_path):
    sbatch(": > submitted")
    done = slipstream("submit", RECIPE, "--nodes", "2", "--dry-run")
    assert done.stdout == text("--nodes", "2", work_dir=tmp_path / "work_dirs" / RECIPE).replace(
        f"--chdir={Path.cwd()}", f"--chdir={tmp_path}"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_missing_sbatch_raises_an_error(slipstream, sbatch):
    done = slipstream("submit", RECIPE, status=1)
    assert "sbatch not found on this machine" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_sbatch_error_is_printed(slipstream, sbatch):
    sbatch("echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1")
    done = slipstream("submit", RECIPE, "--partition", "nowhere", status=1)
    assert "invalid partition specified: nowhere" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
