"""Tests of communication hooks in one process: rounding, PowerSGD's approximation and state, and invalid options."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream.model import MMDistributedDataParallel


@pytest.fixture(autouse=True)
def _group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(how, size=(12, 16)):
    torch.manual_seed(0)
    return MMDistributedDataParallel(nn.Linear(size[1], size[0], bias=False), comm_hook=how)


def receive(model, gradient):
    """Return the gradient that the parameter receives if its local gradient is `gradient`."""
    model.module.weight.grad = None
    rows = torch.eye(gradient.shape[1])
    (model(rows) * gradient.T).sum().backward()
    return model.module.weight.grad.clone()


def matrix(rank, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, rank, generator=generator) @ torch.randn(rank, 16, generator=generator)


@pytest.mark.parametrize(("how", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_rounds_the_gradient_once(how, dtype):
    gradient = matrix(5)
    assert torch.equal(receive(wrapped(how), gradient), gradient.to(dtype).float())


def test_gradient_with_the_rank_of_the_factors_is_exact_from_the_first_step():
    model = wrapped(dict(type="powersgd", rank=2, start_step=0))
    for seed in (1, 2):
        torch.testing.assert_close(receive(model, matrix(2, seed)), matrix(2, seed), rtol=1e-4, atol=1e-5)
        assert model.comm_hook.errors["weight"].abs().max() < 1e-4


def test_gradients_are_exact_until_start_step_and_low_rank_afterwards():
    model = wrapped(dict(type="powersgd", rank=1, start_step=2))
    gradient = matrix(5)
    ranks = [torch.linalg.matrix_rank(receive(model, gradient), rtol=1e-4).item() for _ in range(4)]
    assert ranks == [5, 5, 1, 1]


def test_error_feedback_makes_the_mean_gradient_accurate():
    model = wrapped(dict(type="powersgd", rank=1, start_step=0))
    gradient = matrix(6)
    first = receive(model, gradient)
    received = first + sum(receive(model, gradient) for _ in range(199))
    assert (first - gradient).norm() > 0.3 * gradient.norm()
    assert (received / 200 - gradient).norm() < 0.05 * gradient.norm()


def test_gradient_that_compression_would_not_shrink_is_sent_uncompressed():
    model = wrapped(dict(type="powersgd", rank=1, start_step=0), size=(2, 16))
    gradient = matrix(5)[:2]
    torch.testing.assert_close(receive(model, gradient), gradient)
    assert not model.comm_hook.errors


def test_gradient_overflow_does_not_change_the_state():
    model = wrapped(dict(type="powersgd", rank=1, start_step=0))
    for overflowing in (True, False, True):  # overflow before and after an approximation error is stored
        before = {k: v.clone() for k, v in model.comm_hook.errors.items()}
        broken = matrix(6)
        broken[0, 0] = float("inf") if overflowing else 0
        received = receive(model, broken)
        assert received.isfinite().all() != overflowing
        if overflowing and before:
            assert torch.equal(model.comm_hook.errors["weight"], before["weight"])
        assert model.comm_hook.errors["weight"].isfinite().all()
        assert model.comm_hook.factors["weight"].isfinite().all()
    assert before["weight"].abs().max() > 0


def test_restored_state_returns_the_same_gradients():
    how = dict(type="powersgd", rank=1, start_step=1)
    model, again = wrapped(how), wrapped(how)
    for seed in range(3):
        receive(model, matrix(6, seed))
    state = model.comm_hook.state_dict()
    assert state["step"] == 3
    again.comm_hook.load_state_dict(torch.load(_saved(state), weights_only=True))
    for seed in range(3, 6):
        assert torch.equal(receive(again, matrix(6, seed)), receive(model, matrix(6, seed)))
    other = wrapped(dict(how, rank=2))
    other.comm_hook.load_state_dict(state)
    assert torch.linalg.matrix_rank(receive(other, matrix(6)), rtol=1e-4) == 2


def _saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer
