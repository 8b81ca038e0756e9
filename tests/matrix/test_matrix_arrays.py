"""For every two options, the covering arrays have runs with both (if allowed), with only one, and with neither."""

from itertools import combinations

import pytest
from matrix_arrays import pair_runs
from matrix_nets import NETS
from matrix_options import OF_SEVERAL, OPTIONS, possible, refusal


def allowed(options, processes):
    """Return whether options can be combined on at least one network."""
    return any(possible(options, processes, net) and refusal(options, net) is None for net in NETS)


@pytest.mark.parametrize("processes", [1, 2])
def test_all_pairs_occur_with_both_with_one_and_with_none(processes):
    options = [option for option in OPTIONS if processes > 1 or option not in OF_SEVERAL]
    found = [frozenset(run) for _, run in pair_runs(processes)]
    missing = []
    for one, other in combinations(options, 2):
        wanted = [{one}, {other}, set()] + ([{one, other}] if allowed((one, other), processes) else [])
        missing += [(one, other, on) for on in wanted if not any(run & {one, other} == on for run in found)]
    assert missing == []
    assert len(found) <= 20
