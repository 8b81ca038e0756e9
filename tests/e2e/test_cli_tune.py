"""Tests of the command `slipstream tune`, and of configurations that use the file that it writes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.cli import tune
from slipstream.cli.configure import load_config
from slipstream.cli.main import main
from slipstream.tune import lr_range, search

RECIPE = "street_scenes_pp_lite_t"
SMALL = ["train_dataloader.dataset.size=[32,64]", "train_dataloader.dataset.length=24"]
TUNED = """\
# 1.50 times the speed of the baseline
speed: {channels_last: true, compile: {scope: step}}
train_dataloader: {num_workers: 2, persistent_workers: true}
"""


@pytest.fixture
def tuned(tmp_path):
    (tmp_path / "tuned.yaml").write_text(TUNED)
    return tmp_path / "tuned.yaml"


@pytest.mark.parametrize("recipe", [RECIPE, "cityscapes_ddrnet"], ids=["Runner", "Hydra"])
@pytest.mark.parametrize("sign", ["", "+"])
def test_a_tuned_file_sets_the_options_for_both_kinds_of_recipes(recipe, sign, tuned):
    plain, cfg = load_config(recipe).cfg, load_config(recipe, [f"{sign}speed={tuned}"]).cfg
    assert cfg.speed == {"channels_last": True, "compile": {"scope": "step"}}
    assert cfg.train_dataloader.num_workers == 2
    assert cfg.train_dataloader.batch_size == plain.train_dataloader.batch_size
    assert cfg.model == plain.model


def test_explain_names_the_options_in_a_tuned_file(tuned, capsys):
    assert main(["explain", RECIPE, f"+speed={tuned}"]) == 0
    printed = capsys.readouterr().out
    assert "channels_last" in printed.partition("Off: ")[0]
    assert "speed.channels_last" in printed


@pytest.mark.parametrize(
    "word", ["speed.channels_last=false", "+speed.compile.scope=model", "train_dataloader.num_workers=1"]
)
def test_an_override_that_contradicts_a_tuned_file_raises_an_error(word, tuned, capsys):
    assert main(["explain", RECIPE, f"+speed={tuned}", word]) == 2
    assert "set the same option; remove one of them" in capsys.readouterr().err


def test_other_options_of_the_recipe_are_kept(tuned):
    cfg = load_config(RECIPE, [f"+speed={tuned}", "speed.accumulate=2"]).cfg
    assert cfg.speed == {"accumulate": 2, "channels_last": True, "compile": {"scope": "step"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon"], "budget: must be a duration such as 5m, 90s or 1h30m, not 'soon'"),
        (
            ["--options", "fusd"],
            "options: 'fusd' is not an option that can be measured; did you mean 'fused'?",
        ),
        (["--options", ","], "options: is empty"),
        (["--out", "tuned.txt"], "--out: must be a .yaml file in an existing folder, not 'tuned.txt'"),
        (["--out", "no/such/folder/tuned.yaml"], "--out: must be a .yaml file in an existing folder"),
        (["+speed=missing.yaml"], "speed: cannot read 'missing.yaml'"),
        (["--find", "momentum"], "invalid choice: 'momentum'"),
    ],
)
def test_invalid_arguments_are_reported_on_one_line(arguments, message, capsys):
    with suppress(SystemExit):  # raised by the argument parser
        assert main(["tune", RECIPE, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_short_search_writes_both_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "_MAX_ROUND_SECONDS", 0.02)
    monkeypatch.setattr(search, "_ROUNDS_FRACTION", 0.0)
    assert main(["tune", RECIPE, *SMALL, "--options", "fused,prefetch", "--budget", "5m"]) == 0
    printed = capsys.readouterr().out
    assert "prefetch=2: skipped: batches are already in CPU memory" in printed
    rows = json.loads(Path("tuned.json").read_text())["outcome"]["rows"]
    assert [row["label"] for row in rows] == ["fused", "prefetch=2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned.json", "tuned.yaml"]
    assert load_config(RECIPE, ["+speed=tuned.yaml"]).cfg.model


def test_sigterm_keeps_the_partial_table_and_leaves_no_temporary_files(tmp_path, monkeypatch, capsys):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "_MAX_ROUND_SECONDS", 0.02)
    monkeypatch.setattr(search, "_ROUNDS_FRACTION", 0.0)
    print_row = tune._print_row

    def terminate(row):
        print_row(row)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tune, "_print_row", terminate)
    command = ["tune", RECIPE, *SMALL, "--options", "prefetch,fused", "--budget", "5m"]
    assert main(command) == 130
    assert "The search is not complete: interrupted." in capsys.readouterr().out
    outcome = json.loads(Path("tuned.json").read_text())["outcome"]
    assert (outcome["stopped"], len(outcome["rows"])) == ("interrupted", 1)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("words", [[], ["--find", "lr"], ["--find", "batch_size"]])
def test_the_error_for_a_short_budget_names_the_minimum(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", RECIPE, *SMALL, "--budget", "0.1s", *words]) == 2
    err = capsys.readouterr().err
    assert "budget: 0.1 s is too short" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_learning_rate_is_found_for_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = lr_range.sweep_lr
    monkeypatch.setattr(
        lr_range, "sweep_lr", lambda job, start, end, steps, *rest: sweep(job, start, end, 12, *rest)
    )
    assert main(["tune", RECIPE, *SMALL, "--find", "lr"]) == 0
    printed = capsys.readouterr().out
    assert "steps from 1e-07" in printed
    assert Path("lr_range.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_batch_size_is_found_for_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", RECIPE, *SMALL, "--find", "batch_size", "--max-batch-size", "4"]) == 0
    assert "Largest that fits: 4" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_find_a_batch_size_together(tmp_path):
    command = ["tune", RECIPE, *SMALL, "--find", "batch_size", "--max-batch-size", "2", "--nproc", "2"]
    command = [sys.executable, "-m", "slipstream", *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=400)
    assert done.stdout.count("Largest that fits: 2") == 1
    # BatchNorm fails with batch size 1 on both ranks, and either rank may fail first.
    assert "failed: ValueError: Expected more than 1 value per channel" in done.stdout


@pytest.mark.parametrize("words", [[], ["--find", "lr"]])
@pytest.mark.parametrize("processes", [["--nproc", "2"], ["--launcher", "slurm"]])
def test_only_the_batch_size_is_found_in_several_processes(words, processes, capsys):
    assert main(["tune", RECIPE, *words, *processes]) == 2
    assert f"{processes[0]}: requires `--find batch_size`" in capsys.readouterr().err
