"""Combinations of options in one process match a hand-written loop."""

from itertools import product

import pytest
from matrix_arrays import pair_runs, refused_runs, triple_runs
from matrix_by_hand import by_hand
from matrix_checks import check
from matrix_nets import NETS
from matrix_options import IN_NUMBERS, OPTIONS, TOLERANCES, everything, pairs, possible, precision, triples
from matrix_runs import train


def cases(runs, marks=()):
    """Return runs, which are tuples of a network and options, as test parameters."""
    return [
        pytest.param(net, options, id=f"{net}-{'+'.join(options)}", marks=marks)
        for net, options in dict.fromkeys(runs)
    ]


def on_each(kind):
    return [(net, options) for net in NETS for options in kind(1, net)]


def alone(processes, net):
    return [(option,) for option in OPTIONS if possible([option], processes, net)]


HALVES, SCOPES = (None, "bf16", "fp16"), ("compile=step", "compile=model", None)


def all_options(processes, net):
    ways = product(HALVES, SCOPES, ((), ("SAM",)))
    return [everything(processes, net, half, scope, left_out=left_out) for half, scope, left_out in ways]


def some_of_all_options():
    """Yield runs with all options. On each network, they include every precision and every compilation scope."""
    for (i, half), (j, scope), (k, net) in product(*map(enumerate, (HALVES, SCOPES, NETS))):
        if (i + j) % 3 == k:
            yield net, everything(1, net, half, scope)
    for net, half in zip(NETS, ("fp16", None), strict=True):
        # With compile=step, `everything` leaves out checkpointing unless SAM is left out.
        yield net, everything(1, net, half, left_out=["SAM"])


def compiled(processes, net):
    return [everything(1, net, left_out=["accumulation", "resume", "SAM"])]


def compiled_with_sam(processes, net):
    return [everything(1, net, left_out=["accumulation", "resume"])]


ARRAYS = [*pair_runs(1), *refused_runs(1), *some_of_all_options()]
COMPILED = [*on_each(compiled), *on_each(compiled_with_sam)]
EXHAUSTIVE = [*triple_runs(1), *on_each(pairs), *on_each(triples), *on_each(all_options)]


@pytest.mark.parametrize(
    ("net", "options"),
    [
        *cases(on_each(alone)),
        *cases(ARRAYS, marks=pytest.mark.matrix),
        *cases((run for run in EXHAUSTIVE if run not in ARRAYS), marks=pytest.mark.exhaustive),
    ],
)
def test_options_match_a_hand_written_loop(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path)])


@pytest.mark.parametrize(
    ("net", "options"),
    [
        *cases(COMPILED[:1], marks=pytest.mark.slow),
        *cases(COMPILED[1:], marks=pytest.mark.exhaustive),
    ],
)
def test_inductor_with_all_options_matches_a_hand_written_loop(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path, backend="inductor")])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("half", [None, "bf16", "fp16"])
@pytest.mark.parametrize("option", sorted(IN_NUMBERS - {"bf16", "fp16"}))
def test_missing_option_changes_the_results(net, half, option):
    common = [half] if half else []
    _, plain, _ = by_hand(net, frozenset(common), 1)
    _, weights, averages = by_hand(net, frozenset([*common, option]), 1)
    assert _difference(plain[0], (averages or weights)[0]) > 10 * TOLERANCES[precision(common)][1]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("half", "bound"), [("bf16", "fp32"), ("fp16", "fp16")])
def test_missing_precision_changes_the_results(net, half, bound):
    plain, with_it = (by_hand(net, frozenset(options), 1)[1][0] for options in ([], [half]))
    assert _difference(plain, with_it) > 3 * TOLERANCES[bound][1]


def _difference(one, other):
    """Return the largest difference between two states over the tensors of `other`."""
    return max(float((one[name] - value).abs().max()) for name, value in other.items())
