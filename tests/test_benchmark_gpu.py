"""The GPU benchmark keeps its results if a contender fails, if time runs out, or if the benchmark is restarted."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from time import perf_counter

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu

FACTS = dict.fromkeys(gpu.MATCHING_FIELDS, "same")
NETWORK = "pp_lite_t_seg75"


def works(setting):
    def train(steps, clock):
        clock.start()
        clock.stop()
        return torch.zeros(())

    return train


def fails_at_once(setting):
    raise AssertionError


def fails_later(setting):
    calls = []

    def train(steps, clock):
        calls.append(steps)
        if len(calls) == 5:  # in the second round
            raise RuntimeError("late\nwith details")
        return works(setting)(steps, clock)

    return train


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that measures contenders and returns their entries in the written file."""
    monkeypatch.setattr(gpu, "flops", lambda setting: 1)
    out = tmp_path / "out.md"

    def measure(contenders, end=float("inf")):
        monkeypatch.setattr(gpu, "contenders", lambda device: contenders)
        args = Namespace(size=8, batch_size=1, backend="eager", steps=1, rounds=3, contenders=[])
        gpu.measure(NETWORK, args, gpu.Device("cpu"), gpu.Results(out, FACTS), end)
        assert f"## {NETWORK}" in out.read_text()
        return json.loads(out.with_suffix(".json").read_text())["networks"][NETWORK]["contenders"]

    return measure


def test_failed_contenders_do_not_stop_the_others(measured):
    found = measured({"first": fails_at_once, "second": fails_later, gpu.EAGER: works})
    assert found["first"] == {"error": "AssertionError: "}
    assert found["second"] == {"error": "RuntimeError: late"}
    assert len(found[gpu.EAGER]["seconds"]) == 3


def test_no_contender_starts_after_the_time_limit(measured):
    found = measured({gpu.EAGER: works, "late": works}, end=perf_counter())
    assert "seconds" in found[gpu.EAGER]
    assert found["late"] == {"error": gpu.NOT_MEASURED}


@pytest.mark.parametrize(("key", "kept"), [("date", True), ("crop", False), ("device", False)])
def test_results_with_the_same_settings_are_kept(tmp_path, key, kept):
    old = FACTS | {key: "different", "networks": {NETWORK: {}}}
    (tmp_path / "out.json").write_text(json.dumps(old))
    assert (NETWORK in gpu.Results(tmp_path / "out.md", FACTS).networks) == kept


@pytest.mark.parametrize("content", ['{"a":', "[1]"])
def test_damaged_results_raise_an_error(tmp_path, content):
    (tmp_path / "out.json").write_text(content)
    with pytest.raises(SystemExit, match=r"out\.json cannot be read"):
        gpu.Results(tmp_path / "out.md", FACTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--batch-size", "-1"], "--batch-size must be at least 1, not -1"),
        (["--device", "gpu"], "--device gpu is not available; choose one of .*cpu$"),
        (["--device", "cuda:99"], "--device cuda:99 is not available; choose one of .*cpu$"),
    ],
)
def test_unusable_arguments_raise_a_one_line_error(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit, match=f"^{message}") as exit_:
        gpu.main()
    assert "\n" not in str(exit_.value)
