import random

import numpy as np
import pytest
import torch

from slipstream.checkpoint import get_random_state, load_checkpoint, save_checkpoint, set_random_state


@pytest.fixture(autouse=True)
def _restore_random_state():
    state = get_random_state()
    yield
    set_random_state(state)


def draws():
    # Normally distributed numbers are generated in pairs, and each generator stores the second number of a pair.
    return [
        random.random(), random.gauss(0, 1), np.random.normal(), np.random.randint(100),
        torch.rand(3).tolist(), torch.randn(1).item(),
    ]  # fmt: skip


@pytest.mark.parametrize("before", [0, 1, 700])
def test_random_state_restored_from_a_file_draws_the_same_numbers(tmp_path, before):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for _ in range(before):
        draws()
    # If `before` is even, Python's and NumPy's generators store the second number of a pair after these calls.
    random.gauss(0, 1)
    np.random.normal()
    save_checkpoint({"state": get_random_state()}, tmp_path / "a.pth", pytest.fail)
    wanted = [draws() for _ in range(3)]
    set_random_state(load_checkpoint(tmp_path / "a.pth")["state"])
    assert [draws() for _ in range(3)] == wanted
