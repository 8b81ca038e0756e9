"""For every two options, the covering arrays have runs with both (if allowed), with only one, and with neither."""

from itertools import combinations, product

import pytest
from matrix_arrays import pair_runs, refused_runs, triple_runs
from matrix_nets import NETS
from matrix_options import OF_SEVERAL, OPTIONS, REFUSED, possible, refusal

ARRAYS = {"pairs": pair_runs, "triples": triple_runs}


def allowed(options, processes):
    """Return whether options can be combined on at least one network."""
    return any(possible(options, processes, net) and refusal(options, net) is None for net in NETS)


def names(processes):
    return [option for option in OPTIONS if processes > 1 or option not in OF_SEVERAL]


@pytest.mark.parametrize(("kind", "processes"), [*product(ARRAYS, (1, 2))])
def test_runs_are_possible_and_few(kind, processes):
    runs = ARRAYS[kind](processes)
    assert [run for run in runs if not possible(run[1], processes, run[0])] == []
    assert [run for run in runs if refusal(run[1], run[0])] == []
    assert len(set(runs)) == len(runs) <= 20


@pytest.mark.parametrize(("kind", "processes"), [*product(ARRAYS, (1, 2))])
def test_all_pairs_occur_with_both_with_one_and_with_none(kind, processes):
    always = ("compile=step",) if kind == "triples" else ()
    options = [o for o in names(processes) if o not in always and allowed((*always, o), processes)]
    found = [frozenset(run) for _, run in ARRAYS[kind](processes) if {*always} <= {*run}]
    missing = []
    for one, other in combinations(options, 2):
        wanted = [{one}, {other}, set()]
        wanted += [{one, other}] if allowed((*always, one, other), processes) else []
        missing += [(one, other, on) for on in wanted if not any(run & {one, other} == on for run in found)]
    assert missing == []


@pytest.mark.parametrize(("kind", "processes"), [*product(ARRAYS, (1, 2))])
def test_every_option_occurs_on_each_network(kind, processes):
    runs = ARRAYS[kind](processes)
    always = ("compile=step",) if kind == "triples" else ()
    for option, net in product(names(processes), NETS):
        if possible((*always, option), processes, net) and refusal((*always, option), net) is None:
            assert any(option in run for on, run in runs if on == net), (option, net)


def test_every_error_is_tested():
    tested = {run for processes in (1, 2) for run in refused_runs(processes)}
    assert tested == {(net, key[:-1]) for key in REFUSED for net in NETS if key[-1] in (None, net)}
