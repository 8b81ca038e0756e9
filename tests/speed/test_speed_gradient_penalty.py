"""Tests of losses that contain gradients of the model, such as gradient penalties, with the `compile` option."""

import copy

import pytest
import torch
from torch import nn

from slipstream import accelerate
from slipstream.errors import ModelError


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(8)]


def penalized(net, x):
    """Return the mean score plus the penalty of WGAN-GP."""
    x = x.clone().requires_grad_()
    scores = net(x)
    (grads,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + ((grads.norm(dim=1) - 1) ** 2).mean()


def branching(net, x):
    """Return the same loss, with a branch that prevents the capture of the step as one graph."""
    return penalized(net, x) * (2 if x.sum().item() > 1e9 else 1)


def by_hand(net):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for x in batches():
        optimizer.zero_grad()
        penalized(net, x).backward()
        optimizer.step()
    return net.state_dict()


def train(net, loss, **how):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    speed = dict(compile=dict(backend="aot_eager", **how))
    step = accelerate(net, optimizer, compute_loss=loss, speed=speed)
    for x in batches():
        step(x)
    return step


@pytest.mark.parametrize("loss", [penalized, branching])
def test_gradient_penalty_matches_a_plain_loop(loss, caplog):
    net = critic()
    expected = by_hand(copy.deepcopy(net))
    step = train(net, loss)
    torch.testing.assert_close(net.state_dict(), expected, rtol=1e-9, atol=1e-12)
    if loss is penalized:
        assert step.inner.has_graph or torch.__version__ < "2.12"  # 2.11 cannot capture requires_grad_()
    else:
        assert net._compiled_call_impl is None
        assert "the loss differentiates the model's gradients (create_graph=True)" in caplog.text


def test_compiled_model_runs_eagerly(caplog):
    net = critic()
    expected = by_hand(copy.deepcopy(net))
    train(net, penalized, scope="model")
    torch.testing.assert_close(net.state_dict(), expected, rtol=0, atol=0)
    assert (
        "cannot be compiled (the loss differentiates the model's gradients (create_graph=True))"
        in caplog.text
    )


@pytest.mark.parametrize("sam", [False, True])
def test_unverified_model_raises_an_error_with_a_remedy(sam):
    net = critic()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    speed = dict(compile=dict(backend="aot_eager", scope="model", verify=False), sam=sam)
    step = accelerate(net, optimizer, compute_loss=penalized, speed=speed)
    with pytest.raises(ModelError, match=r"create_graph=True.*set compile=False"):
        step(batches()[0])


def test_several_backward_passes_in_some_batches_match_a_plain_loop():
    """Every third batch balances two losses by the norms of their gradients (GradNorm)."""

    def balanced():
        state = {"batch": 0, "weight": 1.0}

        def loss(net, x):
            state["batch"] += 1
            scores = net(x)
            one, other = scores.mean(), scores.square().mean()
            if state["batch"] % 3 == 0:
                norms = [
                    torch.autograd.grad(each, net[2].weight, retain_graph=True)[0].norm()
                    for each in (one, other)
                ]
                state["weight"] = (norms[0] / norms[1]).detach().clamp(max=10)
            return one + state["weight"] * other

        return loss

    net = critic()
    expected, loss = copy.deepcopy(net), balanced()
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.01)
    for x in batches():
        optimizer.zero_grad()
        loss(expected, x).backward()
        optimizer.step()
    train(net, balanced(), scope="model")
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)
    assert net._compiled_call_impl is not None
