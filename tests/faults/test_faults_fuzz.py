"""Run the fuzzers on a few hundred random inputs. `make faults` runs them on 100,000 inputs each."""

import pytest

from faults import fuzz_files
from faults.fuzz_config import inputs, prepare, tried


@pytest.fixture(scope="module", autouse=True)
def _imported():
    prepare()


@pytest.mark.parametrize("seed", range(0, 120, 30))
def test_errors_for_mutated_configurations_name_a_key(seed):
    found = [tried(*item) for item in inputs(seed, 30)]
    assert [finding for finding in found if finding is not None and finding.kind != "accepted"] == []


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_errors_for_damaged_files_name_the_file(seed):
    assert list(filter(None, map(fuzz_files.read_damaged_file, range(seed, seed + 100)))) == []


@pytest.mark.parametrize("seed", range(0, 30, 15))
def test_errors_for_random_overrides_name_the_recipe_or_a_key(seed):
    assert list(filter(None, map(fuzz_files.compose_with_overrides, range(seed, seed + 15)))) == []
