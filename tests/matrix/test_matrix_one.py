"""Combinations of options in one process match a hand-written loop."""

from itertools import product

import pytest
from matrix_arrays import pair_runs, refused_runs
from matrix_by_hand import by_hand
from matrix_checks import check
from matrix_nets import NETS
from matrix_options import IN_NUMBERS, OPTIONS, TOLERANCES, everything, possible, precision
from matrix_runs import train


def cases(runs, marks=()):
    """Return runs, which are tuples of a network and options, as test parameters."""
    return [
        pytest.param(net, options, id=f"{net}-{'+'.join(options)}", marks=marks)
        for net, options in dict.fromkeys(runs)
    ]


ALONE = [(net, (option,)) for net in NETS for option in OPTIONS if possible([option], 1, net)]
HALVES, SCOPES = (None, "bf16", "fp16"), ("compile=step", "compile=model", None)


def all_options():
    """Yield runs with all options. They include every precision with every compilation scope on one network."""
    for (i, half), (j, scope), (k, net) in product(*map(enumerate, (HALVES, SCOPES, NETS))):
        if (i + j) % 3 == k:
            yield net, everything(1, net, half, scope)
    # With compile=step, `everything` leaves out checkpointing unless SAM is left out.
    yield "conv", everything(1, "conv", "fp16", left_out=["SAM"])


RUNS = [*pair_runs(1), *refused_runs(1), *all_options()]


@pytest.mark.parametrize(("net", "options"), [*cases(ALONE), *cases(RUNS, marks=pytest.mark.matrix)])
def test_options_match_a_hand_written_loop(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path)])


@pytest.mark.slow
def test_inductor_with_all_options_matches_a_hand_written_loop(tmp_path):
    options = everything(1, "conv", left_out=["accumulation", "resume", "SAM"])
    check("conv", options, [train("conv", options, tmp_path, backend="inductor")])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("half", [None, "bf16", "fp16"])
@pytest.mark.parametrize("option", sorted(IN_NUMBERS - {"bf16", "fp16"}))
def test_missing_option_changes_the_results(net, half, option):
    common = [half] if half else []
    _, plain, _ = by_hand(net, frozenset(common), 1)
    _, weights, averages = by_hand(net, frozenset([*common, option]), 1)
    with_it = (averages or weights)[0]
    apart = max(float((plain[0][name] - value).abs().max()) for name, value in with_it.items())
    assert apart > 10 * TOLERANCES[precision(common)][1]
