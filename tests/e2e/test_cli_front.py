"""Tests of `--version`, `--json` and the commands `completion`, `recipes`, `check` and `new`."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from slipstream.cli.main import main
from slipstream.cli.parser import build_parser
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


def completed(line, folder, capsys):
    """Return the completions that bash offers for the last word of a line."""
    if shutil.which("bash") is None:
        pytest.skip("requires bash")
    assert main(["completion", "bash"]) == 0
    words = line.split(" ")
    script = capsys.readouterr().out + (
        f"COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)}); COMP_CWORD={len(words) - 1}\n"
        "_slipstream; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_and_recipes(tmp_path, capsys):
    assert completed("slipstream pre", tmp_path, capsys) == ["predict"]
    assert set(completed("slipstream ", tmp_path, capsys)) == {
        *build_parser()[1].choices,
        "--help",
        "--version",
    }
    assert completed("slipstream train --work", tmp_path, capsys) == ["--work-dir"]
    found = completed("slipstream train cifar10", tmp_path, capsys)
    assert found == [name for name in recipes() if name.startswith("cifar10")] != []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_for_other_shells_contain_every_option(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, parser in build_parser()[1].choices.items():
        assert name in script
        for option in parser.options():
            assert (f"-l {option[2:]} " if shell == "fish" else option) in script


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


def problems(value, schema, place=""):
    """Yield the places where a value does not match a schema. Only keywords that the schema uses are supported."""
    names = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    numbers = {"integer": int, "number": (int, float)}
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        number = kind in numbers and isinstance(value, numbers[kind]) and not isinstance(value, bool)
        if number or (kind in names and isinstance(value, names[kind])):
            break
    else:
        if kinds:
            yield f"{place}: type"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: enum"
    if "anyOf" in schema and all(list(problems(value, each, place)) for each in schema["anyOf"]):
        yield f"{place}: anyOf"
    if "if" in schema:
        branch = "else" if list(problems(value, schema["if"])) else "then"
        yield from problems(value, schema[branch], place)
    if isinstance(value, dict):
        yield from (
            f"{place}: {name} is required" for name in schema.get("required", ()) if name not in value
        )
        known = schema.get("properties", {})
        for key, item in value.items():
            if key in known:
                yield from problems(item, known[key], f"{place}.{key}")
            elif schema.get("additionalProperties") is False:
                yield f"{place}.{key}: unknown"


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


def test_the_schema_accepts_every_recipe_and_rejects_wrong_keys(capsys):
    from slipstream.recipes.find import FOLDER

    assert main(["recipes", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for name in recipes():
        values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        assert list(problems(values, schema)) == [], name
    for wrong in (
        dict(speed=dict(compil=True)),
        dict(speed=dict(precision="bf61")),
        dict(randomness=dict(seed="x")),
        dict(train_cfg=dict(by_epoch=True, max_epochs="many")),
    ):
        assert list(problems(dict(model={}, **wrong), schema)), wrong
    for right in (
        dict(speed="auto"),
        dict(speed=dict(compile=dict(scope="step"), ema=True)),
        dict(resume=True),
    ):
        assert list(problems(dict(model={}, **right), schema)) == [], right


# ---- check -----------------------------------------------------------------------------------------------


def test_check_runs_one_batch_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["train"]["samples"], found["val"]["samples"]) == (40, 6)
    assert 1 < found["train"]["loss"] < 20
    assert 0 <= found["val"]["mIoU"] <= 100
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
        (
            "custom_hooks=[{type: CheckpointHook, save_bst: mIoU}]",
            "custom_hooks[0]: CheckpointHook has no parameter",
        ),
        ("default_hooks.checkpont={interval: 1}", "did you mean 'checkpoint'"),
        ("visualizer.vis_backends=[{type: CSVVisBackends}]", "did you mean 'CSVVisBackend'"),
    ],
)
def test_check_reports_unknown_metrics_arguments_and_backends(
    override, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, override]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("weights", "loss"), [("1e300,0.4,0.4,0.4", "inf"), ("1e300,-1e300,0.4,0.4", "nan")])
def test_check_fails_if_the_loss_is_nonfinite(weights, loss, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, *SMALL, f"model.loss.weights=[{weights}]", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"the loss of the first training batch is {loss}" in printed.err


def test_check_prints_nonfinite_metrics_as_null(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "slipstream.runner.Runner.val", lambda runner: {"mIoU": float("nan"), "accuracy": 0.5}
    )
    assert main(["check", RECIPE, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["val"]["mIoU"], found["val"]["accuracy"]) == (None, 0.5)


# ---- json ------------------------------------------------------------------------------------------------


def test_doctor_explain_and_runs_print_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert dict(state="ok", name="torch", text=torch.__version__) in found["Packages"]
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
    assert "best mIoU" in done.stdout
    assert (folder / "predictions/sheet_mask.png").is_file()


def test_new_does_not_overwrite_files(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["new", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
