"""Tests of `slipstream train --sweep` and `--multirun` with a small network."""

import json
import os
from pathlib import Path

import pytest

from slipstream.cli import sweep as module
from slipstream.cli.child import Child
from slipstream.cli.main import main
from slipstream.cli.parser import parse
from slipstream.cli.sweep import read_sweep
from slipstream.errors import ConfigError

CONFIG = """
from tiny_runs import LOCAL, Net, loader, validation

model = dict(type=Net)
train_dataloader = loader()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
visualizer = LOCAL
randomness = dict(seed=0)
log_level = "ERROR"
locals().update(validation())
"""
LR = "optim_wrapper.optimizer.lr"


@pytest.fixture(autouse=True)
def in_process(tmp_path, monkeypatch, capsys):
    """Execute the runs of a sweep in this process to save time. Return the list of their arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "tiny.py").write_text(CONFIG)
    started = []

    def run(argv):
        started.append(argv)
        status = main(argv[2:])
        return Child(status, capsys.readouterr().err.strip(), 2.0)

    monkeypatch.setattr(module, "run_child", run)
    return started


def results(tmp_path):
    return json.loads((tmp_path / "work_dirs/tiny/sweep/sweep.json").read_text())


def test_resume_skips_completed_runs_and_keeps_their_results(tmp_path, in_process):
    command = ["train", "tiny.py", "--sweep", f"{LR}=0.1,0.01"]
    assert main(command) == 0
    before = results(tmp_path)
    assert (main([*command, "--resume"]), len(in_process)) == (0, 2)
    assert results(tmp_path) == before
    failed = [before[0], {**before[1], "status": 1, "error": "x"}]
    (tmp_path / "work_dirs/tiny/sweep/sweep.json").write_text(json.dumps(failed))
    assert (main([*command, "--resume"]), len(in_process)) == (0, 3)
    assert [run["status"] for run in results(tmp_path)] == [0, 0]
    assert (main([*command, "--resume", "train_cfg.max_epochs=2"]), len(in_process)) == (0, 5)
    assert results(tmp_path)[0]["seconds"] == before[0]["seconds"] + 2.0  # the fake duration of a process
    (tmp_path / "work_dirs/tiny/sweep/sweep.json").write_text("[3, {")
    assert (main([*command, "--resume", "train_cfg.max_epochs=2"]), len(in_process)) == (0, 7)


def test_resume_with_another_value_skips_completed_runs_whose_number_changes(tmp_path, in_process):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1,0.01"]) == 0
    before = results(tmp_path)
    assert (main(["train", "tiny.py", "--sweep", f"{LR}=0.2,0.1,0.01", "--resume"]), len(in_process)) == (
        0,
        3,
    )
    first, *others = results(tmp_path)
    assert others == before
    assert Path(first["folder"]).name == f"0_{LR}=0.2"


def test_results_for_other_values_are_kept(tmp_path, in_process):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1,0.01"]) == 0
    before = results(tmp_path)
    assert (main(["train", "tiny.py", "--sweep", f"{LR}=0.2", "--resume"]), len(in_process)) == (0, 3)
    assert results(tmp_path)[1:] == before
    assert (main(["train", "tiny.py", "--sweep", f"{LR}=0.01,0.1", "--resume"]), len(in_process)) == (0, 3)
    assert results(tmp_path)[:2] == before[::-1]


def test_added_seeds_are_part_of_the_mean(tmp_path, in_process, capsys):
    assert main(["train", "tiny.py", "--sweep", "randomness.seed=1"]) == 0
    capsys.readouterr()
    assert main(["train", "tiny.py", "--sweep", "randomness.seed=2", "--resume"]) == 0
    first, second = (run["metrics"]["acc"] for run in results(tmp_path))
    assert f"{(first + second) / 2:.4g} ±" in capsys.readouterr().out.partition("over the seeds:")[2]


def test_only_comparable_runs_are_shown_in_the_order_of_the_keys():
    run = module.Run({"lr": "1", "seed": "2"}, "w/0")
    others = [
        module.Run({"seed": "0", "lr": "1"}, "w/1"),
        module.Run({"seed": "1", "lr": "1"}, "w/2", overrides=["train_cfg.max_epochs=3"]),
        module.Run({"seed": "1"}, "w/3"),
    ]
    (shown,) = module._comparable(others, run)
    assert (list(shown.values.items()), shown.folder) == ([("lr", "1"), ("seed", "0")], "w/1")


def test_results_of_a_moved_sweep_are_kept(tmp_path, in_process):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1"]) == 0
    before = results(tmp_path)
    (tmp_path / "work_dirs").rename(tmp_path / "moved")
    command = [
        "train",
        "tiny.py",
        "--sweep",
        f"{LR}=0.1,0.2",
        "--work-dir",
        str(tmp_path / "moved/tiny"),
        "--resume",
    ]
    assert (main(command), len(in_process)) == (0, 2)
    (first, _) = json.loads((tmp_path / "moved/tiny/sweep/sweep.json").read_text())
    assert first["metrics"] == before[0]["metrics"]


def test_resume_with_other_values_and_different_settings_raises_an_error(tmp_path, in_process, capsys):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1"]) == 0
    assert (
        main(["train", "tiny.py", "--sweep", f"{LR}=0.2", "--resume", "optim_wrapper.accumulative_counts=2"])
        != 0
    )
    assert "different values for optim_wrapper.accumulative_counts" in capsys.readouterr().err
    assert len(in_process) == 1


def test_new_sweep_does_not_replace_an_earlier_one(tmp_path, in_process, capsys):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1"]) == 0
    before = results(tmp_path)
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.2"]) != 0
    assert (
        "contains an earlier sweep; to continue it or to add values, use `--resume`"
        in capsys.readouterr().err
    )
    assert (results(tmp_path), len(in_process)) == (before, 1)
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.2", "--work-dir", "other"]) == 0


def test_runs_with_the_same_shortened_name_have_different_folders():
    runs = [module.Run({"a": value}, folder) for value, folder in [("1", "w/0"), ("2", "w/0"), ("3", "w/1")]]
    interrupted = module.Run({"a": "2"}, "w/0", status=130)
    assert module._restore_completed(Path("w"), runs, [interrupted]) == []
    assert [run.folder for run in runs] == ["w/0_2", "w/0", "w/1"]  # "2" continues from its own checkpoints


def test_resume_with_another_configuration_file_raises_an_error(tmp_path, in_process, capsys):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1"]) == 0
    (tmp_path / "other.py").write_text(CONFIG)
    command = ["train", "other.py", "--sweep", f"{LR}=0.1,0.2", "--work-dir", "work_dirs/tiny", "--resume"]
    assert (main(command), len(in_process)) == (2, 1)
    assert "trained tiny.py, not other.py" in capsys.readouterr().err


def test_plus_signs_do_not_matter(tmp_path, in_process):
    override = "optim_wrapper.accumulative_counts=1"
    assert main(["train", "tiny.py", "--sweep", "+randomness.seed=1", "+" + override]) == 0
    before = results(tmp_path)
    command = ["train", "tiny.py", "--sweep", "randomness.seed=1", "--resume", override]
    assert (main(command), len(in_process)) == (0, 1)
    assert [run["metrics"] for run in results(tmp_path)] == [before[0]["metrics"]]


def test_length_given_by_another_key_is_the_same(tmp_path, in_process):
    command = ["train", "tiny.py", "--sweep", f"{LR}=0.1"]
    assert main([*command, "epochs=2", "train_cfg.max_epochs=1"]) == 0
    assert (main([*command, "--resume"]), len(in_process)) == (0, 1)
    assert (main([*command, "train_cfg.max_epochs=1", "epochs=2", "--resume"]), len(in_process)) == (0, 2)
    assert [(run["status"], run["length"]) for run in results(tmp_path)] == [(0, 2), (0, 1)]


def test_results_of_a_longer_run_are_not_used_for_a_shorter_one(tmp_path, in_process, capsys):
    command = ["train", "tiny.py", "--sweep", f"{LR}=0.1"]
    assert main([*command, "train_cfg.max_epochs=2"]) == 0
    assert main([*command, "--resume"]) == 1
    failed, longer = results(tmp_path)
    assert "was saved at epoch 2, so its results do not apply to max_epochs=1" in failed["error"]
    assert len(list((tmp_path / failed["folder"]).glob("2*/"))) == 1  # a log folder only for the longer run
    assert (longer["status"], longer["overrides"]) == (0, ["train_cfg.max_epochs=2"])
    assert (main([*command, "--resume", "train_cfg.max_epochs=2"]), len(in_process)) == (0, 2)
    assert results(tmp_path)[0] == longer


def test_order_of_overrides_that_replace_each_other_matters(tmp_path, in_process, capsys):
    command = ["train", "tiny.py", "--sweep", f"{LR}=0.1"]
    overrides = ["optim_wrapper.accumulative_counts=1", "optim_wrapper.accumulative_counts=2"]
    assert main([*command, *overrides]) == 0
    assert main([*command, *overrides[::-1], "epochs=2", "--resume"]) != 0
    message = "different values for optim_wrapper.accumulative_counts (or with another order"
    assert message in capsys.readouterr().err
    assert len(in_process) == 1


def test_resume_with_different_settings_raises_an_error(tmp_path, in_process, capsys):
    command = ["train", "tiny.py", "--sweep", f"{LR}=0.1,0.01"]
    assert main(command) == 0
    before = results(tmp_path)
    assert main([*command, "--resume", "optim_wrapper.optimizer.weight_decay=0.5"]) != 0
    assert "different values for optim_wrapper.optimizer.weight_decay" in capsys.readouterr().err
    assert results(tmp_path) == before
    assert len(in_process) == 2


def test_each_combination_trains_in_its_folder(tmp_path, capsys):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1,1e-3", "--sweep", "randomness.seed=1,2"]) == 0
    runs = results(tmp_path)
    assert [list(run["values"].values()) for run in runs] == [
        ["0.1", "1"],
        ["0.1", "2"],
        ["1e-3", "1"],
        ["1e-3", "2"],
    ]
    logged = []
    for run in runs:
        (lines,) = (tmp_path / run["folder"]).glob("*/vis_data/scalars.json")
        logged.append(json.loads(lines.read_text().splitlines()[-1])["acc"])
        assert (tmp_path / run["folder"] / "epoch_1.pth").is_file()
    assert [run["metrics"]["acc"] for run in runs] == logged
    assert len(set(logged)) > 1
    printed = capsys.readouterr().out
    for name in ("lr", "seed", "acc", "images/s"):
        assert name in printed


def test_sweep_over_seeds_prints_means_and_best_values(tmp_path, capsys):
    text = "default_hooks = dict(checkpoint=dict(type='CheckpointHook', save_best='acc', rule='greater'))\n"
    (tmp_path / "tiny.py").write_text(CONFIG + text)
    words = ["--sweep", f"{LR}=0.1,1e-3", "--sweep", "randomness.seed=1,2", "train_cfg.max_epochs=2"]
    assert main(["train", "tiny.py", *words]) == 0
    runs = results(tmp_path)
    for run in runs:
        (lines,) = (tmp_path / run["folder"]).glob("*/vis_data/scalars.json")
        values = [row["acc"] for row in map(json.loads, lines.read_text().splitlines()) if "acc" in row]
        assert len(values) == 2
        assert run["metrics"]["best acc"] == max(values)
    lines = capsys.readouterr().out.partition("over the seeds:")[2].splitlines()
    for number, rate in enumerate(["0.1", "1e-3"]):
        one, other = (run["metrics"]["acc"] for run in runs[2 * number : 2 * number + 2])
        (line,) = (line for line in lines if line.split()[:1] == [rate])
        assert f"{(one + other) / 2:.4g}" in line
        if one != other:
            assert f"± {abs(one - other) / 2**0.5:.2g}" in line


def test_means_show_how_many_runs_failed(capsys):
    statuses = {"0.1": (0, 0), "0.2": (0, 1), "0.3": (1, 1)}
    module._print_means(
        [
            module.Run(
                {"lr": rate, "seed": seed}, "w", status=status, metrics={"acc": 2.0} if status == 0 else {}
            )
            for rate, pair in statuses.items()
            for seed, status in zip("12", pair, strict=True)
        ]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {words[0]: words[1:] for words in lines if words[:1] and words[0] in statuses}
    assert rows == {"0.1": ["2", "±", "0", "2"], "0.2": ["2", "1", "of", "2"], "0.3": ["0", "of", "2"]}


def test_failed_run_has_a_row_and_the_other_runs_continue(tmp_path, capsys):
    assert main(["train", "tiny.py", "--sweep", f"{LR}=-1,0.1"]) == 1
    printed = capsys.readouterr().out
    failed, done = results(tmp_path)
    assert (failed["status"], done["status"]) == (2, 0)
    assert "must be a float of at least 0, not -1" in failed["error"]
    assert failed["metrics"] == {}
    assert f"failed: slipstream: error: {LR}" in printed
    assert "2 s" in printed


def test_all_runs_are_in_one_folder_if_the_work_dir_depends_on_a_swept_value(
    in_process, monkeypatch, tmp_path
):
    monkeypatch.setattr(module, "run_child", lambda argv: in_process.append(argv) or Child(0, "", 1.0))
    assert main(["train", "cityscapes_ddrnet", "--sweep", "experiment_name=a,b"]) == 0
    runs = json.loads((tmp_path / "work_dirs/a/sweep/sweep.json").read_text())
    names = ["0_experiment_name=a", "1_experiment_name=b"]
    assert [run["folder"] for run in runs] == [f"work_dirs/a/sweep/{name}" for name in names]


def test_run_without_validation_reports_its_loss(tmp_path):
    assert (
        main(
            [
                "train",
                "tiny.py",
                "val_cfg=None",
                "val_dataloader=None",
                "val_evaluator=None",
                "--sweep",
                f"{LR}=0",
            ]
        )
        == 0
    )
    assert set(results(tmp_path)[0]["metrics"]) == {"loss", "images/s"}


def test_metrics_named_after_times_and_nan_are_in_the_results(tmp_path, capsys):
    config = CONFIG.replace(
        "validation()", "validation([dict(type=Scripted, values=[x], name=n) for n, x in M])"
    )
    names = {"inference_time": 1.5, "loss_ratio": float("nan")}
    config = f"nan = float('nan')\nM = {list(names.items())}\n" + config.replace(
        "loader,", "Scripted, loader,"
    )
    (tmp_path / "tiny.py").write_text(config)
    command = ["train", "tiny.py", "--sweep", f"{LR}=0.1"]
    for _ in range(2):  # the second time, the results are read from the file
        assert main(command) == 0
        text = (tmp_path / "work_dirs/tiny/sweep/sweep.json").read_text()
        (row,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert set(row["metrics"]) == {*names, "images/s"}
        assert (row["metrics"]["inference_time"], row["metrics"]["loss_ratio"]) == (1.5, "nan")
        printed = capsys.readouterr().out
        assert [name for name in (*names, "nan") if name not in printed] == []
        command = [*command, "--resume"]


def test_run_that_completes_after_an_interruption_is_complete(tmp_path, monkeypatch):
    def completes(argv):
        path = next(word for word in argv if word.startswith("--result=")).partition("=")[2]
        Path(path).write_text('{"acc": 0.5}')
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_child", completes)
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1,0.2"]) == 130
    first, second = results(tmp_path)
    assert (first["status"], first["error"], first["metrics"], second["status"]) == (
        0,
        "",
        {"acc": 0.5},
        None,
    )


def test_ctrl_c_keeps_the_table(tmp_path, monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_child", interrupted)
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1,0.2"]) == 130
    assert "failed" not in (printed := capsys.readouterr().out)
    assert "interrupted" in printed
    assert "runs are not complete; to continue, use the same command with --resume" in printed
    assert "not started" in printed
    assert [run["status"] for run in results(tmp_path)] == [130, None]


def test_preempted_run_ends_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_child", lambda argv: Child(75, "preempted", 1.0))
    assert main(["train", "tiny.py", "--sweep", f"{LR}=0.1,0.2"]) == 75
    assert [run["status"] for run in results(tmp_path)] == [75, None]


def test_other_options_are_passed_to_each_run(in_process, monkeypatch):
    monkeypatch.setattr(module, "run_child", lambda argv: in_process.append(argv) or Child(0, "", 1.0))
    assert (
        main(["train", "tiny.py", "--work-dir", "w", "--resume", "--nproc", "2", "--sweep", f"{LR}=0.1"]) == 0
    )
    (argv,) = in_process
    parsed = parse(argv[2:])
    assert (parsed.nproc, parsed.resume, parsed.max_restarts, parsed.sweep) == ("2", True, 0, [])
    assert {f"--work-dir=w/sweep/0_{LR}=0.1", "--resume", "--nproc=2", f"{LR}=0.1"} <= set(argv)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "lr"], "--sweep: must be key=value,value,..."),
        (["--sweep", "=1"], "--sweep: must be key=value,value,..."),
        (["--sweep", f"{LR}=0.1,,0.2"], "--sweep: must be key=value,value,..."),
        (["--sweep", f"{LR}=0.1", "--sweep", f"{LR}=0.2"], "is set twice"),
        ([f"{LR}=0.1", "--sweep", f"{LR}=0.2"], "is set twice"),
        (["--sweep", f"{LR}=0.1,0.1"], "contains a value twice"),
        (["--sweep", "optim_wraper.optimizer.lr=0.1"], "did you mean 'optim_wrapper.optimizer.lr'"),
        (
            ["--sweep", f"{LR}=0.1", "--launcher", "slurm"],
            "`--sweep` cannot be combined with `--launcher`. For several",
        ),
        (["--sweep", "work_dir=a,b"], "--sweep: 'work_dir' cannot be swept"),
        (["--multirun", "+work_dir=a,b"], "--sweep: 'work_dir' cannot be swept"),
        (["--multirun", f"{LR}=0.1"], "requires an override with several values"),
        (["--multirun", f"{LR}=0.1,0.1"], "contains a value twice"),
    ],
)
def test_invalid_sweep_raises_an_error_before_the_first_run(in_process, words, message, capsys):
    assert main(["train", "tiny.py", *words]) == 2
    assert message in capsys.readouterr().err
    assert not in_process


def test_commas_in_brackets_and_quotes_do_not_separate_values():
    found = read_sweep(["betas=(0.9,0.99),[0.8,0.9]", "name='a,b',c", 'd="x,(",{a: 1, b: 2}'])
    assert found == {
        "betas": ["(0.9,0.99)", "[0.8,0.9]"],
        "name": ["'a,b'", "c"],
        "d": ['"x,("', "{a: 1, b: 2}"],
    }
    with pytest.raises(ConfigError, match="twice"):
        read_sweep(["lr=1"], overrides=["+lr=2"])


def test_multirun_trains_once_per_value_of_each_override(in_process, monkeypatch):
    monkeypatch.setattr(module, "run_child", lambda argv: in_process.append(argv) or Child(0, "", 1.0))
    words = [f"{LR}=0.1,0.2", "train_cfg.max_epochs=2", "optim_wrapper.optimizer.type=SGD,Adam"]
    assert main(["train", "tiny.py", "--multirun", *words]) == 0
    assert len(in_process) == 4
    for argv in in_process:
        assert "train_cfg.max_epochs=2" in argv
        assert "--multirun" not in argv
        assert not [word for word in argv if "," in word and "=" in word and "work_dirs" not in word]
    rates = [word for argv in in_process for word in argv if word.startswith(f"{LR}=")]
    assert rates == [f"{LR}=0.1", f"{LR}=0.1", f"{LR}=0.2", f"{LR}=0.2"]


def test_shortcuts_of_recipes_can_be_swept(in_process, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "run_child", lambda argv: in_process.append(argv) or Child(0, "", 1.0))
    assert main(["train", "camvid_ddrnet_23_slim", "--work-dir", "w", "--sweep", "lr=1e-4,3e-4,1e-3"]) == 0
    assert [argv[4] for argv in in_process] == ["lr=1e-4", "lr=3e-4", "lr=1e-3"]


@pytest.mark.slow
def test_runs_of_a_sweep_train_in_separate_processes(slipstream, tmp_path, monkeypatch):
    from faulty_fixtures import FOLDER

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")]))
    done = slipstream("train", "tiny.py", "--sweep", f"{LR}=0.1,-1", status=1)
    assert "not -1" in done.stderr
    assert [run["status"] for run in results(tmp_path)] == [0, 2]
