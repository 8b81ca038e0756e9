"""All combinations of options in one process: results equal a hand-written loop."""

import pytest
from matrix_by_hand import by_hand
from matrix_checks import check
from matrix_nets import NETS
from matrix_options import IN_NUMBERS, OPTIONS, TOLERANCES, everything, pairs, possible, precision, triples
from matrix_runs import train


def cases(kind):
    return [
        pytest.param(net, options, id=f"{net}-{'+'.join(options)}")
        for net in NETS
        for options in kind(1, net)
    ]


def alone(processes, net):
    return [(option,) for option in OPTIONS if possible([option], processes, net)]


def at_once(processes, net):
    scopes = ("compile=step", "compile=model", None)
    return [everything(processes, net, half, scope) for half in (None, "bf16", "fp16") for scope in scopes]


def compiled(processes, net):
    return [tuple(option for option in everything(1, net) if option not in ("accumulation", "resume"))]


@pytest.mark.parametrize(("net", "options"), [*cases(alone), *cases(pairs), *cases(at_once)])
def test_option_pairs_equal_a_hand_written_loop(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path)])


@pytest.mark.matrix
@pytest.mark.parametrize(("net", "options"), cases(triples))
def test_option_pairs_in_the_step_graph_equal_a_hand_written_loop(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path)])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("net", "options"), cases(compiled))
def test_inductor_with_all_options_equals_a_hand_written_loop(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path, backend="inductor")])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("option", sorted(IN_NUMBERS - {"EMA"}))
def test_missing_option_changes_the_results(net, option):
    plain, with_it = (by_hand(net, frozenset(options), 1) for options in ([], [option]))
    bound = 3 * TOLERANCES[precision([option])][1] if option == "fp16" else 3 * TOLERANCES["fp32"][1]
    apart = max(float((plain[1][0][name] - value).abs().max()) for name, value in with_it[1][0].items())
    assert apart > bound
