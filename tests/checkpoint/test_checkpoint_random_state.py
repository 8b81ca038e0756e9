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


def test_get_random_state_does_not_change_the_state():
    torch.manual_seed(0)
    get_random_state()
    wanted = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=wanted))


def test_cuda_build_without_a_device_saves_no_device_state(monkeypatch):
    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert "accelerator" not in get_random_state()
