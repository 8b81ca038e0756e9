"""Tests of the table and the summary of a tuning result, and of the files that store the result."""

import json

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.tune import cache
from slipstream.tune.jobs import Setting
from slipstream.tune.result import TuneResult, read_tuned
from slipstream.tune.search import Outcome, Row
from slipstream.tune.statistics import Estimate

FASTER = Estimate(2.0, 1.9, 2.1, 6, 0.98)


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
    assert (
        "compile=step, at 2.00 times the speed of the baseline (1.90 to 2.10 in 6 rounds, measured against"
        in text
    )
    assert "One epoch of 100 steps: 10 s before, 5 s after (4.76 to 5.26 s; without" in text
    assert "takes 30 s. The faster plan saves this much time within 600 steps" in text


def test_summary_is_not_more_certain_than_the_measurement():
    wide = Estimate(1.22, 0.91, 2.0, 10, 0.97)
    assert "\nProbably fastest: " in f"\n{result(total=wide).summary()}"
    row = Row("num_workers=2", "adopted", "probably faster", "baseline", wide)
    assert "\nProbably fastest: " in f"\n{result(rows=[row]).summary()}"
    assert "\nFastest: " in f"\n{result().summary()}"


def test_summary_names_faster_options_that_are_not_part_of_the_plan():
    row = Row("parallel=ddp, 2 processes", "faster", "use --nproc 2", "baseline", FASTER)
    text = result(rows=[row]).summary()
    assert "parallel=ddp, 2 processes is 2.00 times as fast as the baseline; use --nproc 2" in text


def test_the_batch_size_for_accumulation_is_written_and_read(tmp_path):
    halves = result(setting=Setting({"accumulate": 2}, batch_size=4, split=2))
    assert halves.batch_size == 4
    tuned = read_tuned(halves.save(tmp_path / "tuned.yaml"))
    assert tuned == {"speed": {"accumulate": 2}, "train_dataloader": {"batch_size": 4}}


def test_summary_reports_that_no_option_is_faster():
    text = result(total=None, setting=Setting(), adopted=[]).summary()
    assert (
        "No measured option was shown to make a_recipe faster on this machine; keep the current options."
        in text
    )
    assert "Undecided" not in text


def test_summary_reports_undecided_options():
    unclear = Estimate(1.64, 0.74, 1.8, 5, 0.6)
    rows = [Row("fused", "inconclusive", estimate=unclear), *(Row(name, "not measured") for name in "ab")]
    text = result(total=None, setting=Setting(), adopted=[], rows=rows).summary()
    assert "Undecided: 1 inconclusive, 2 not measured. Increase the budget" in text


def test_table_contains_ratio_interval_memory_and_reason():
    text = str(result())
    assert "1.90-2.10" in text
    assert "812" in text
    assert "rejected: different losses: 1 and 2" in text


def test_a_product_of_ratios_has_no_interval():
    text = result(total_is_product=True).summary()
    assert "compile=step, at 2.00 times the speed of the baseline (product of the individual ratios)." in text


def test_square_brackets_in_a_reason_are_printed():
    text = str(result(rows=[Row("compile=step", "failed", "see [/opt/x] and [red]c++[/red]")]))
    assert "failed: see [/opt/x] and [red]c++[/red]" in text


def test_a_partial_result_contains_the_reason():
    summary = result(stopped="interrupted").summary()
    assert summary.startswith("The search is not complete, because it was interrupted.")
    summary = result(stopped="the time budget ran out").summary()
    assert summary.startswith("The search is not complete, because the time budget ran out.")


def test_saved_plan_keeps_the_options_of_the_baseline(tmp_path):
    path = result().save(tmp_path / "tuned.yaml")
    assert read_tuned(path) == {
        "speed": {"accumulate": 2, "compile": {"scope": "step"}},
        "train_dataloader": {"num_workers": 2, "persistent_workers": True},
    }
    rows = json.loads((tmp_path / "tuned.json").read_text())["outcome"]["rows"]
    assert [row["label"] for row in rows] == ["compile=step", "precision=bf16"]
    assert rows[0]["estimate"] == {"ratio": 2.0, "low": 1.9, "high": 2.1, "rounds": 6, "confidence": 0.98}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned.json", "tuned.yaml"]


def test_nested_options_in_a_configuration_are_saved(tmp_path):
    speed = Config({"speed": {"ema": {"decay": 0.9}}}).speed
    path = TuneResult(Outcome(setting=Setting({"fused": True})), speed).save(tmp_path / "tuned.yaml")
    assert read_tuned(path) == {"speed": {"ema": {"decay": 0.9}, "fused": True}}


def test_auto_stays_in_the_plan():
    assert TuneResult(Outcome(setting=Setting({"fused": True})), "auto").speed == {
        "auto": True,
        "fused": True,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no 'speed' key"),
        ("speed: 3", "'speed' must be a dict, not int"),
        ("speed: {}\nmodel: {type: X}", "unknown key 'model'"),
        ("speed: {}\ntrain_dataloader: {dataset: {type: X}}", "unknown key 'train_dataloader.dataset'"),
        ("speed: [", "is not a YAML file"),
        ("speed: !!python/object/apply:os.getcwd []", "is not a YAML file"),
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


def test_cache_returns_an_equal_result(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    file = cache.cache_file({"model": "a"}, ["fused"], 60.0)
    assert cache.load(file) is None
    cache.store(file, result())
    again = cache.load(file)
    assert again.cached
    assert again.outcome == result().outcome
    assert again.yaml_text().partition("\nspeed")[2] == result().yaml_text().partition("\nspeed")[2]
    last = "Read from the cache (measured on cpu in 250 s). To measure again, use --no-cache, or cache=False in Python."
    assert again.summary().splitlines()[-1] == last


def test_cache_does_not_keep_partial_results_or_read_damaged_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    file = cache.cache_file("run", ["fused"], 60.0)
    cache.store(file, result(stopped="interrupted"))
    assert not file.exists()
    cache.store(file, result())
    file.write_text(file.read_text()[:100])
    assert cache.load(file) is None


def test_cache_distinguishes_runs_options_and_versions(monkeypatch):
    files = {
        cache.cache_file("run", ["fused"], 60.0),
        cache.cache_file("other", ["fused"], 60.0),
        cache.cache_file("run", ["compile"], 60.0),
        cache.cache_file("run", ["fused"], 61.0),
    }
    monkeypatch.setattr(cache, "__version__", "0.0.0")
    files.add(cache.cache_file("run", ["fused"], 60.0))
    assert len(files) == 5


class Drawing:
    """A dataset whose samples depend on the global random number generator."""

    def __init__(self, *shape):
        self.shape = shape

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(self.shape), index


def key(loss=nn.functional.mse_loss, dataset=None):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(dataset or Drawing(2), batch_size=4)
    state = torch.get_rng_state()
    described = cache.describe_objects(model, loader, optimizer, loss)
    assert torch.equal(torch.get_rng_state(), state)
    return cache.cache_file(described, ["fused"], 60.0)


def test_the_cache_distinguishes_constants_of_the_loss_and_shapes_of_samples():
    def loss(outputs, targets):
        return (lambda scale: scale * outputs.sum())(2.0)

    def scaled(outputs, targets):
        return (lambda scale: 3.0 * outputs.sum())(2.0)

    scaled.__qualname__ = loss.__qualname__
    assert key(loss) == key(loss)
    assert len({key(loss), key(scaled), key(loss, Drawing(2, 5)), key(loss, [0] * 8)}) == 4


def test_a_dataset_whose_first_sample_fails_has_a_key():
    assert key(dataset=Drawing("wrong")) != key()


def test_yaml_comments_contain_the_measured_figures():
    lines = result().yaml_text().splitlines()
    assert lines[0].startswith("# Fastest: num_workers=2 + compile=step, at 2.00 times")
    assert yaml.safe_load("\n".join(lines))["speed"]["compile"] == {"scope": "step"}
