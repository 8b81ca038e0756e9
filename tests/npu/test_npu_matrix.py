"""Test pairs of options on an NPU, most of them on only one of the two networks."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "matrix"))

from matrix_checks import check
from matrix_options import pairs
from matrix_runs import train

NETS = ("conv", "transformer")
ONE = [(net, pair) for net in NETS for pair in pairs(1, net)]


@pytest.mark.parametrize(
    ("net", "options"), ONE, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_option_pairs_match_a_hand_written_loop_on_the_cpu(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path)])
