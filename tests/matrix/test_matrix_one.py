"""Every lever with every other in one process: the numbers are those of a loop written by hand."""

import pytest
from matrix_by_hand import by_hand
from matrix_checks import check
from matrix_levers import IN_NUMBERS, LEVERS, TOLERANCES, everything, pairs, possible, precision, triples
from matrix_nets import NETS
from matrix_runs import train


def cases(kind):
    return [
        pytest.param(net, levers, id=f"{net}-{'+'.join(levers)}") for net in NETS for levers in kind(1, net)
    ]


def alone(processes, net):
    return [(lever,) for lever in LEVERS if possible([lever], processes, net)]


def at_once(processes, net):
    scopes = ("compile=step", "compile=model", None)
    return [everything(processes, net, half, scope) for half in (None, "bf16", "fp16") for scope in scopes]


def compiled(processes, net):
    return [tuple(lever for lever in everything(1, net) if lever not in ("accumulation", "resume"))]


@pytest.mark.parametrize(("net", "levers"), [*cases(alone), *cases(pairs), *cases(at_once)])
def test_levers_together_train_as_a_loop_by_hand(net, levers, tmp_path):
    check(net, levers, [train(net, levers, tmp_path)])


@pytest.mark.matrix
@pytest.mark.parametrize(("net", "levers"), cases(triples))
def test_two_levers_in_one_graph_train_as_a_loop_by_hand(net, levers, tmp_path):
    check(net, levers, [train(net, levers, tmp_path)])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("net", "levers"), cases(compiled))
def test_compiled_code_of_all_levers_trains_as_a_loop_by_hand(net, levers, tmp_path):
    check(net, levers, [train(net, levers, tmp_path, backend="inductor")])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("lever", sorted(IN_NUMBERS - {"EMA"}))
def test_a_lever_that_were_left_out_would_be_seen(net, lever):
    plain, with_it = (by_hand(net, frozenset(levers), 1) for levers in ([], [lever]))
    bound = 3 * TOLERANCES[precision([lever])][1] if lever == "fp16" else 3 * TOLERANCES["fp32"][1]
    apart = max(float((plain[1][0][name] - value).abs().max()) for name, value in with_it[1][0].items())
    assert apart > bound
