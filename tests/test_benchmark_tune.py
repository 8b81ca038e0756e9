"""Tests of the benchmark that remeasures the plans found by `slipstream tune`."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import importlib

benchmark = importlib.import_module("tune")

CONFIG = """
from tiny_runs import Net, loader
model = dict(type=Net)
train_dataloader = loader()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""


def test_the_plan_is_compared_with_the_baseline_auto_and_each_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(benchmark, "MAX_ROUNDS", 5)
    Path("tiny.py").write_text(CONFIG)
    arguments = ["tiny.py", "--limit", "120", "--budget", "40", "--options", "channels_last,fused"]
    assert benchmark.main([*arguments, "--out", "out/tune.md"]) == 0
    (case,) = json.loads(Path("out/tune.json").read_text())["cases"]
    assert case["search seconds"] <= case["budget"]
    names = [other["name"] for other in case["compared"]]
    labels = {label for label, status, _ in case["rows"] if status in benchmark.MEASURED_STATUSES}
    plan = {" + ".join(case["adopted"]) or "baseline"}
    assert set(names) == {"baseline", 'speed="auto"', *labels} - plan
    for other in case["compared"]:
        assert len(other["seconds"]) == len(case["plan seconds"]) == 5, other
        assert other["ratio"]["low"] <= other["ratio"]["ratio"] <= other["ratio"]["high"]
    text = Path("out/tune.md").read_text()
    assert "## tiny.py" in text
    assert 'speed="auto"' in text


@pytest.mark.parametrize(
    ("low", "high", "rounds", "expected"),
    [
        (1.1, 1.2, 5, "faster"),
        (0.8, 0.9, 5, "slower"),
        (0.9, 1.1, 5, "not distinguishable"),
        (2.0, 2.0, 4, "too few rounds"),
    ],
)
def test_the_verdict_depends_on_the_interval(low, high, rounds, expected):
    assert benchmark.verdict({"ratio": 1.0, "low": low, "high": high, "rounds": rounds}) == expected
    assert benchmark.verdict(None) == "not measured"
