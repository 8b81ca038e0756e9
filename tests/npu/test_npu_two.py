"""Tests on two NPUs: single options, all compatible options together, and errors for unsupported backends."""

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent.parent / name) for name in ("matrix", "distributed")]

from matrix_checks import check
from matrix_options import OPTIONS, everything
from matrix_runs import train_all
from two_processes import run_in_two

NETS = ("conv", "transformer")


def alone(net):
    ways = [dict(half=half) for half in (None, "bf16", "fp16")]
    ways += [dict(way, compiled="compile=model", parallel="FSDP2") for way in ways]
    singles = [
        (option,)
        for n, option in enumerate(OPTIONS)
        if net == (NETS[n % 2] if option != "SyncBN" else "conv")
    ]
    return [*singles, *(everything(2, net, **way) for way in ways[NETS.index(net) :: 2])]


TWO = [(net, options) for net in NETS for options in alone(net)]


def on_two(folder):
    assert torch.accelerator.current_accelerator().type == "npu"
    return train_all(TWO, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train all combinations in two processes, and return the results of both processes."""
    return run_in_two([on_two], tmp_path_factory.mktemp("two"), timeout=600)["on_two"]


@pytest.mark.parametrize(
    ("net", "options"), TWO, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_two_npus_match_a_hand_written_loop_in_one_process(trained, net, options):
    run = net, options
    check(net, options, [a.get(run, "an earlier run failed") if isinstance(a, dict) else a for a in trained])
