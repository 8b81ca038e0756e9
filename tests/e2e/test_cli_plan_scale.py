"""Tests of the command `slipstream plan-scale` and of its output in docs/scaling.md."""

import json
import re
import shlex

import pytest

from slipstream.cli.main import main


def test_recipe_is_planned_with_its_image_size_and_batch(slipstream):
    printed = slipstream("plan-scale", "camvid_pp_lite_t", "--gpus", "8,64").stdout
    assert "160 x 224 pixels" in printed
    assert "8 samples per GPU" in printed
    rows = [line.split() for line in printed.splitlines() if re.match(r"\s*\d+ ", line)]
    assert [row[0] for row in rows] == ["8", "64"]
    assert {row[1] for row in rows} <= {"ddp", "hsdp", "fsdp2"}
    assert "not measurements" in printed


def planned(capsys, *arguments):
    assert main(["plan-scale", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_best_strategy_is_the_fastest_one_that_fits(capsys):
    for row in planned(capsys, "segformer_1b", "--size", "512x512", "--batch-per-gpu", "1"):
        kinds = [kind for kind in ("ddp", "hsdp", "fsdp2") if kind in row and row[kind]["fits"]]
        assert row["best"] == min(kinds, key=lambda kind: row[kind]["step_time"])


def test_measured_step_time_is_the_predicted_time_for_one_gpu(capsys):
    arguments = ("pp_lite_t_seg", "--size", "128x256", "--gpus", "1", "--step-time", "0.02")
    assert planned(capsys, *arguments)[0]["ddp"]["step_time"] == pytest.approx(0.02)


def test_sync_bn_has_a_cost_and_can_be_disabled(capsys):
    arguments = ("pp_lite_t_seg", "--size", "128x256", "--gpus", "64")
    with_it, without = planned(capsys, *arguments), planned(capsys, *arguments, "--no-sync-bn")
    assert without[0]["ddp"]["exposed"] < with_it[0]["ddp"]["exposed"]


def test_model_that_fits_on_no_gpu_is_reported(capsys):
    assert (
        main(["plan-scale", "segformer_1b", "--batch-per-gpu", "64", "--gpu", "rtx4090", "--gpus", "8"]) == 0
    )
    printed = capsys.readouterr().out
    assert "none fits" in printed
    assert printed.count("too big") == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pp_lite_x_seg"], ["'pp_lite_x_seg'", "did you mean 'pp_lite_t_seg'"]),
        (["segformer_1bx"], ["did you mean 'segformer_1b'"]),
        (["nowhere.yaml"], ["nowhere.yaml"]),
        (["--gpus", "8,x"], ["--gpus", "'x'"]),
        (["--gpus", "12"], ["number of GPUs (12)", "GPUs per node (8)"]),
        (["--gpu", "h10"], ["unknown gpu 'h10'", "did you mean 'h100'"]),
        (["--network", "ib40"], ["unknown network 'ib40'", "did you mean 'ib400'"]),
        (["--size", "512"], ["--size", "'512'", "512x1024"]),
        (["--step-time", "0"], ["--step-time", "'0'", "positive"]),
        (["--step-time", "nan"], ["--step-time", "'nan'"]),
        (["--batch-per-gpu", "0"], ["--batch-per-gpu", "'0'"]),
        (["MultiHeadCrossEntropy"], ["MultiHeadCrossEntropy", "does not accept"]),
    ],
)
def test_invalid_argument_raises_a_one_line_error(capsys, arguments, expected):
    try:
        status = main(["plan-scale", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    for part in expected:
        assert part in lines[0]


def consoles(root):
    text = (root / "docs" / "scaling.md").read_text(encoding="utf-8")
    return re.findall(r"```console\n\$ slipstream (plan-scale[^\n]*)\n(.*?)```", text, re.DOTALL)


def test_documented_predictions_match_the_output(root, capsys):
    shown = consoles(root)
    assert len(shown) >= 3
    for arguments, expected in shown:
        assert main(shlex.split(arguments)) == 0
        printed = capsys.readouterr().out
        assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines(), arguments


def test_documented_measurements_match_the_results(root):
    document = (root / "docs" / "scaling.md").read_text(encoding="utf-8")
    results = (root / "benchmarks" / "results" / "scaling.md").read_text(encoding="utf-8")
    measured = re.findall(r"^\| .* \|$", results, re.MULTILINE)
    assert len(measured) >= 6
    assert "\n".join(measured) in document
