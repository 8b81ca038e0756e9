"""Combinations of options in two processes match a hand-written loop in one process."""

from functools import cache

import pytest
from matrix_arrays import pair_runs, refused_runs
from matrix_checks import check
from matrix_nets import NETS
from matrix_options import everything, pairs, triples
from matrix_runs import train_all
from two_processes import run_in_two


def all_options(net):
    ways = [dict(half=half) for half in (None, "bf16", "fp16")]
    ways += [dict(way, compiled="compile=model", parallel="FSDP2") for way in ways]
    ways += [dict(way, left_out=["SAM"]) for way in ways]
    return [(net, everything(2, net, **way)) for way in ways]


def some_of_all_options():
    """Yield runs that combine all compatible options, under DDP and FSDP2.

    One run leaves out SAM, because SAM and activation checkpointing cannot be combined in a step that is compiled as
    one graph.
    """
    yield "conv", everything(2, "conv", half="fp16")
    yield "transformer", everything(2, "transformer", left_out=["SAM"])
    yield "transformer", everything(2, "transformer", "bf16", compiled="compile=model", parallel="FSDP2")


ARRAYS = list(dict.fromkeys([*pair_runs(2), *refused_runs(2), *some_of_all_options()]))
SINGLE = [(net, options) for net in NETS for kind in (pairs, triples) for options in kind(2, net)]
MANY = [run for net in NETS for run in all_options(net)]
EXHAUSTIVE = [run for run in dict.fromkeys([*SINGLE, *MANY]) if run not in ARRAYS]


def arrays(folder):
    return train_all(ARRAYS, folder)


def exhaustive(folder):
    return train_all(EXHAUSTIVE, folder)


def cases(function, runs, mark):
    """Return runs, which are tuples of a network and options, as test parameters."""
    return [
        pytest.param(function, net, options, id=f"{net}-{'+'.join(options)}", marks=mark)
        for net, options in runs
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that runs a training function once, in two processes, and returns the results of both."""

    @cache
    def of(function):
        return run_in_two([function], tmp_path_factory.mktemp("two"), timeout=2400)[function.__name__]

    return of


def both(answers, run):
    return [a.get(run, "an earlier run failed") if isinstance(a, dict) else a for a in answers]


@pytest.mark.parametrize(
    ("function", "net", "options"),
    [*cases(arrays, ARRAYS, pytest.mark.matrix), *cases(exhaustive, EXHAUSTIVE, pytest.mark.exhaustive)],
)
def test_options_match_a_hand_written_loop_in_one_process(trained, function, net, options):
    check(net, options, both(trained(function), (net, options)))
