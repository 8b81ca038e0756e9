"""Torch's backward pass and optimizer step without checks and profiler records."""

import torch
from torch import nn
from torch.profiler import profile

from slipstream.optim import OptimWrapper
from slipstream.torch_calls import run_optimizer


def test_backward_gives_the_gradients_of_torch():
    layer, other = nn.Linear(3, 2), nn.Linear(2, 1)
    wrapper = OptimWrapper(torch.optim.SGD([*layer.parameters(), *other.parameters()], lr=1.0))
    loss = lambda: other(layer(torch.ones(4, 3))).square().mean()  # noqa: E731
    wrapper.backward(loss(), inputs=list(layer.parameters()))
    assert other.weight.grad is None
    expected = torch.autograd.grad(loss(), list(layer.parameters()))
    for param, grad in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
    wrapper.backward(loss(), inputs=other.weight)  # a tensor
    wrapper.backward(loss())
    torch.testing.assert_close(other.weight.grad, 2 * torch.autograd.grad(loss(), other.weight)[0])


def test_gradients_of_two_steps_do_not_share_memory():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    wrapper = OptimWrapper(torch.optim.SGD([first, second], lr=1.0))
    wrapper.backward(first.view(()))
    first.grad.mul_(5)
    wrapper.backward(second.view(()))
    assert (first.grad.item(), second.grad.item()) == (5, 1)


def test_the_optimizer_runs_hooks_replacements_and_records_in_profiles():
    layer, calls = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.weight.grad = torch.ones(1, 1)
    before = layer.weight.detach().clone()
    run_optimizer(optimizer)
    torch.testing.assert_close(layer.weight.detach(), before - 1)
    handle = optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    run_optimizer(optimizer)
    handle.remove()
    with profile() as recorded:
        run_optimizer(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in recorded.key_averages()}
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    run_optimizer(optimizer)
    assert optimizer._opt_called
    original = torch.optim.SGD.step
    try:
        del optimizer.step
        torch.optim.SGD.step = lambda self: calls.append("replaced")
        run_optimizer(optimizer)
    finally:
        torch.optim.SGD.step = original
    assert calls == ["hook", "replaced"]
