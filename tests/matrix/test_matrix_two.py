"""All combinations of options in two processes match a hand-written loop in one process."""

from functools import cache

import pytest
from matrix_checks import check
from matrix_options import everything, pairs, triples
from matrix_runs import train_all
from two_processes import run_in_two

pytestmark = pytest.mark.matrix


def pair_runs(net):
    ways = [dict(half=half) for half in (None, "bf16", "fp16")]
    ways += [dict(way, compiled="compile=model", parallel="FSDP2") for way in ways]
    ways += [dict(way, left_out=["SAM"]) for way in ways]
    return [*pairs(2, net), *(everything(2, net, **way) for way in ways)]


def conv_pairs(folder):
    return train_all("conv", pair_runs("conv"), folder)


def transformer_pairs(folder):
    return train_all("transformer", pair_runs("transformer"), folder)


def conv_triples(folder):
    return train_all("conv", triples(2, "conv"), folder)


def transformer_triples(folder):
    return train_all("transformer", triples(2, "transformer"), folder)


def cases(of):
    for net, function in of.items():
        for options in triples(2, net) if "triples" in function.__name__ else pair_runs(net):
            yield pytest.param(function, net, options, id=f"{net}-{'+'.join(options)}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the results of both processes, computed once for all tests of a function."""

    @cache
    def of(function):
        return run_in_two([function], tmp_path_factory.mktemp("two"), timeout=1200)[function.__name__]

    return of


def both(answers, options):
    return [a.get(options, "an earlier run failed") if isinstance(a, dict) else a for a in answers]


PAIRS = [*cases({"conv": conv_pairs, "transformer": transformer_pairs})]
TRIPLES = [*cases({"conv": conv_triples, "transformer": transformer_triples})]


@pytest.mark.parametrize(("function", "net", "options"), PAIRS)
def test_option_pairs_match_a_hand_written_loop_in_one_process(trained, function, net, options):
    check(net, options, both(trained(function), options))


@pytest.mark.parametrize(("function", "net", "options"), TRIPLES)
def test_option_pairs_in_the_step_graph_match_a_hand_written_loop_in_one_process(
    trained, function, net, options
):
    check(net, options, both(trained(function), options))
