"""Run the fuzzers on a few hundred random inputs. `make faults` runs them on 100,000 inputs each."""

import pytest

from faults import fuzz_config, fuzz_files
from faults.fuzz_config import inputs, prepare, run, tried
from slipstream.cli.configure import load_config


@pytest.fixture(scope="module", autouse=True)
def _imported():
    prepare()


@pytest.mark.parametrize("seed", range(0, 240, 30))
def test_errors_for_mutated_configurations_name_a_key(seed):
    found = [tried(*item) for item in inputs(seed, 30)]
    assert [finding for finding in found if finding is not None and finding.kind != "accepted"] == []


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_errors_for_damaged_files_name_the_file(seed):
    assert list(filter(None, map(fuzz_files.read_damaged_file, range(seed, seed + 100)))) == []


@pytest.mark.parametrize("seed", range(0, 30, 15))
def test_errors_for_random_overrides_name_the_recipe_or_a_key(seed):
    assert list(filter(None, map(fuzz_files.compose_with_overrides, range(seed, seed + 15)))) == []


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        ("cityscapes_regseg48", ["=" + "1" * 400]),  # too long for a file name
        ("street_scenes_pp_lite_t", ["++=["]),
        ("street_scenes_pp_lite_t", ["+=" + "1" * 400]),
        ("street_scenes_pp_lite_t", ["@=["]),
    ],
)
def test_overrides_found_by_the_fuzzer_raise_errors_that_name_them(recipe, given):
    names = [recipe, given[0].partition("=")[0] or given[0]]
    assert fuzz_files._tried(lambda: load_config(recipe, given), "", names) is None


@pytest.mark.parametrize(
    ("key", "value"), [("in_channels", True), ("out_channels", 0), ("kernel_size", False), ("kernel_size", 0)]
)
def test_layer_values_found_by_the_fuzzer_raise_errors_that_name_the_key(key, value):
    cfg = fuzz_config.segmentation()
    cfg["model"]["network"][key] = value
    assert tried(cfg, [], "segmentation") is None


def test_foreign_errors_and_errors_without_a_key_are_found(monkeypatch):
    def fail(error):
        def run(cfg):
            raise error

        return run

    monkeypatch.setattr(fuzz_config, "run", fail(KeyError("x")))
    assert tried({"lr": 1}, [], "base").kind == "foreign"
    monkeypatch.setattr(fuzz_config, "run", fail(fuzz_config.SlipstreamError("something is wrong")))
    assert tried({"lr": 1}, [], "base").kind == "no key"
    monkeypatch.setattr(fuzz_config, "run", fail(fuzz_config.SlipstreamError("lr: must be positive")))
    assert tried({"lr": 1}, [], "base") is None
    monkeypatch.setattr(fuzz_config, "run", run)
