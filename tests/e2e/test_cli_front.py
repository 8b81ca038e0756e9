"""Tests of `--version`, `--json` and the commands `completion`, `recipes`, `check` and `new`."""

import json
import re
import subprocess
import sys

import pytest
import torch
import yaml

from slipstream.cli.main import main
from slipstream.recipes import recipes
from slipstream.version import __version__

RECIPE = "street_scenes_pp_lite_t"
SMALL = [
    *(f"{split}_dataloader.dataset.size=[64,128]" for split in ("train", "val")),
    "train_dataloader.dataset.length=40",
    "val_dataloader.dataset.length=6",
]


def test_version_names_slipstream_and_torch(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"slipstream {__version__} (torch {torch.__version__}, Python 3.")


# ---- completion ------------------------------------------------------------------------------------------


# ---- recipes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RECIPE, "cifar10_resnet"])
def test_recipes_show_prints_a_recipe_that_can_be_used(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "show", name, "lr=0.125"]) == 0
    text = capsys.readouterr().out
    assert re.match(rf"# .*{name}\.yaml\n", text)
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["recipes", "show", "mine.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == yaml.safe_load(text)
    assert "0.125" in text


def test_recipes_are_listed_as_json(capsys):
    assert main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recipes()


@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "--json"]], ids=str)
def test_a_reader_that_closes_the_pipe_ends_the_command_without_a_message(arguments):
    code = f"import sys; from slipstream.cli.main import main; sys.exit(main({arguments}))"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    try:
        assert process.stderr.read() == ""
        assert process.wait(60) == 141
    finally:
        process.kill()
        process.stderr.close()


# ---- check -----------------------------------------------------------------------------------------------


def test_check_runs_one_batch_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^train: samples 40, checked_batches 1, loss \d", printed, re.MULTILINE)
    assert re.search(r"^val: samples 6, .*mIoU \d", printed, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_check_reports_an_error_that_only_occurs_with_a_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, "model.network.num_classes=5"]) == 1
    assert "19" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_check_reports_an_error_in_validation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, "val_evaluator.type=IoUMetrik"]) == 2
    assert "did you mean 'IoUMetric'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("default_hooks.checkpoint.save_best=accuracy", "unknown metric 'accuracy'"),
        ("default_hooks.checkpoint.save_bst=mIoU", "did you mean 'save_best'"),
        ("default_hooks.checkpont={interval: 1}", "default_hooks.checkpont"),
        ("visualizer.vis_backends=[{type: LocalVisBackends}]", "did you mean 'LocalVisBackend'"),
    ],
)
def test_check_reports_unknown_metrics_arguments_and_backends(
    override, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, override]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_check_fails_if_the_loss_is_nonfinite(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, "model.loss.weights=[1e300,0.4,0.4,0.4]"]) == 1
    assert "became inf at iteration 1" in capsys.readouterr().err


# ---- json ------------------------------------------------------------------------------------------------


def test_explain_and_runs_print_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", RECIPE, "speed.precision=bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (precision,) = (row for row in found["options"] if row["option"] == "precision")
    assert precision["value"] == "bf16"
    assert "compile" in found["off"]
    (tmp_path / "work_dirs").mkdir()
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    run = tmp_path / "work_dirs/one/20260101_000000"
    run.mkdir(parents=True)
    (run / "report.json").write_text("damaged")
    assert main(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["problem"]
    assert row["run"].endswith("20260101_000000")


# ---- new -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_project_trains_and_predicts(slipstream, tmp_path):
    """The commands run in new processes, because the recipe imports a module from its folder."""
    slipstream("new", "mine")
    folder = tmp_path / "mine"
    slipstream("check", "recipe.py", cwd=folder)
    done = slipstream("train", "recipe.py", cwd=folder)
    score = float(re.search(r"mIoU (\d+\.\d+)", done.stdout.splitlines()[-1])[1])
    assert score > 45, "the mIoU is too close to 27, the mIoU of predicting only the background"
    slipstream("data", "show", "recipe.py", "--out", "sheet.png", cwd=folder)
    done = slipstream("predict", "sheet.png", cwd=folder)
    assert "best_mIoU" in done.stdout
    assert (folder / "predictions/sheet_mask.png").is_file()


def test_new_does_not_overwrite_files(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["new", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
