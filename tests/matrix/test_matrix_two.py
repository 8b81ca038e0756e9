"""Combinations of options in two processes match a hand-written loop in one process."""

import pytest
from matrix_arrays import pair_runs, refused_runs
from matrix_checks import check
from matrix_options import everything
from matrix_runs import train_all
from two_processes import run_in_two

ALL_OPTIONS = [
    ("conv", everything(2, "conv", half="fp16")),
    # SAM and activation checkpointing cannot be combined in a step that is compiled as one graph.
    ("transformer", everything(2, "transformer", left_out=["SAM"])),
    ("transformer", everything(2, "transformer", "bf16", compiled="compile=model", parallel="FSDP2")),
]
RUNS = list(dict.fromkeys([*pair_runs(2), *refused_runs(2), *ALL_OPTIONS]))


def train_both(folder):
    return train_all(RUNS, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train all runs in two processes, and return the results of both."""
    return run_in_two([train_both], tmp_path_factory.mktemp("two"), timeout=2400)["train_both"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("net", "options"), RUNS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_options_match_a_hand_written_loop_in_one_process(trained, net, options):
    run = net, options
    check(net, options, [a.get(run, "an earlier run failed") if isinstance(a, dict) else a for a in trained])
