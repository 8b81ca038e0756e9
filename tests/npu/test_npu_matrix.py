"""Test all pairs of options on an NPU."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "matrix"))

from matrix_arrays import pair_runs
from matrix_checks import check
from matrix_runs import train


@pytest.mark.parametrize(
    ("net", "options"), pair_runs(1), ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_option_pairs_match_a_hand_written_loop_on_the_cpu(net, options, tmp_path):
    check(net, options, [train(net, options, tmp_path)])
