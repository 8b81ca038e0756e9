"""Tests of the table and the summary of a tuning result, and of the files that store the result."""

import json

import pytest

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.tune.jobs import Setting
from slipstream.tune.result import TuneResult, read_tuned
from slipstream.tune.search import Outcome, Row
from slipstream.tune.statistics import Estimate

FASTER = Estimate(2.0, 1.9, 2.1, 6)


def result(**changes):
    outcome = Outcome(
        rows=[
            Row("compile=step", "adopted", "", "baseline", FASTER, 0.05, 812.0, 30.0, (1e-6, 2e-6)),
            Row("precision=bf16", "rejected", "different losses: 1 and 2"),
        ],
        setting=Setting({"compile": {"scope": "step"}}, num_workers=2, compile_cache="/tmp/x"),
        adopted=["num_workers=2", "compile=step"],
        baseline_seconds=0.1,
        baseline_mib=700.0,
        total=FASTER,
        compile_seconds=30.0,
        steps_per_epoch=100,
        seconds=250.0,
        budget=300.0,
    )
    for name, value in changes.items():
        setattr(outcome, name, value)
    return TuneResult(outcome, {"accumulate": 2}, "a_recipe")


def test_summary_reports_epoch_times_and_when_compilation_pays_off():
    text = result().summary()
    assert "compile=step, at 2.00 times the speed of the baseline (1.90 to 2.10 in 6 rounds)" in text
    assert "One epoch of 100 steps: 10 s before, 5 s after" in text
    assert "takes 30 s, which 600 steps save" in text


def test_summary_reports_that_no_option_is_faster():
    text = result(total=None, setting=Setting(), adopted=[]).summary()
    assert "No measured option was shown to make a_recipe faster on this machine." in text


def test_table_contains_ratio_interval_memory_and_reason():
    text = str(result())
    assert "1.90-2.10" in text
    assert "812" in text
    assert "rejected: different losses: 1 and 2" in text


def test_saved_plan_keeps_the_options_of_the_baseline(tmp_path):
    path = result().save(tmp_path / "tuned.yaml")
    assert read_tuned(path) == {
        "speed": {"accumulate": 2, "compile": {"scope": "step"}},
        "train_dataloader": {"num_workers": 2, "persistent_workers": True},
    }
    rows = json.loads((tmp_path / "tuned.json").read_text())["outcome"]["rows"]
    assert [row["label"] for row in rows] == ["compile=step", "precision=bf16"]
    assert rows[0]["estimate"] == {"ratio": 2.0, "low": 1.9, "high": 2.1, "rounds": 6}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned.json", "tuned.yaml"]


def test_nested_options_in_a_configuration_are_saved(tmp_path):
    speed = Config({"speed": {"ema": {"decay": 0.9}}}).speed
    path = TuneResult(Outcome(setting=Setting({"fused": True})), speed).save(tmp_path / "tuned.yaml")
    assert read_tuned(path) == {"speed": {"ema": {"decay": 0.9}, "fused": True}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a file written by"),
        ("speed: 3", "not a file written by"),
        ("speed: {}\nmodel: {type: X}", "not a file written by"),
        ("speed: {}\ntrain_dataloader: {dataset: {type: X}}", "not a file written by"),
        ("speed: [", "cannot read"),
        ("speed: !!python/object/apply:os.getcwd []", "cannot read"),
    ],
)
def test_a_file_with_different_contents_is_rejected(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tuned(tmp_path / "bad.yaml")


def test_errors_name_missing_files_and_folders(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_tuned(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot write"):
        result().save(tmp_path / "missing" / "tuned.yaml")
