"""Verification detects wrong graphs and wrong compiled code, and has no side effects."""

import copy

import pytest
import torch
import torch.nn.functional as F
from graphs import batches, net
from torch import nn

from slipstream.step.verification import (
    GraphCode,
    Verification,
    VerificationNeeded,
    WrongNumbersError,
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def capture(model, batch, change=None):
    """Return a captured step of gradient descent, and the same step for eager execution."""
    params = list(model.parameters())

    def step(x, y):
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        with torch.no_grad():
            torch._foreach_sub_(params, torch._foreach_mul(grads, 0.1))

    def backend(graph, inputs):
        return GraphCode(graph, (change or (lambda run: run))(graph.forward), verified=False)

    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        pytest.raises(BaseException) as caught,  # noqa: PT011
    ):
        torch.compile(step, fullgraph=True, backend=backend)(*batch)
    assert isinstance(caught.value, VerificationNeeded)
    return caught.value, step


def start(captured, names):
    named = [names.get(id(value), "an input") for value in captured.inputs]
    return Verification(captured.code.graph, captured.code.run, captured.inputs, named, torch.random.fork_rng)


def verified(model, batch, change=None, eager=None):
    captured, step = capture(model, batch, change)
    names = {id(param): f"the weight '{name}'" for name, param in model.named_parameters()}
    verification = start(captured, names)
    (eager or step)(*batch)
    return verification.compare({}, {id(p) for p in model.parameters()}, set())


def deep(blocks=16, seed=0, width=16):
    torch.manual_seed(seed)
    layers = [
        layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
    ]
    return nn.Sequential(nn.Flatten(), nn.Linear(108, width), *layers, nn.Linear(width, 4))


def perturbed(run):
    """Simulate the rounding errors of a different summation order."""

    def other(*inputs):
        with torch.no_grad():
            for value in inputs:
                if value.is_floating_point():
                    value.mul_(1 + 1e-7 * (torch.rand_like(value) - 0.5))
        return run(*inputs)

    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correct_graph_passes_verification(dtype):
    x, y = batches(1)[0]
    assert verified(net().to(dtype), (x.to(dtype), y))


def test_capture_and_verification_have_no_side_effects():
    model, batch = net(0.3), batches(1)[0]
    before = copy.deepcopy(model.state_dict())
    kept, state = copy.deepcopy(batch), torch.get_rng_state()
    captured, _ = capture(model, batch)
    start(captured, {})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(batch, kept, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("blocks", "seed"), [(16, 0), (16, 11), (20, 0), (25, 1), (30, 0)])
def test_rounding_errors_of_an_ill_conditioned_network_pass_verification(blocks, seed):
    """This network's float32 gradients have large rounding errors, both with eager kernels and with any compiler."""
    x, y = batches(1, size=4)[0]
    model = deep(blocks, seed)
    exact = copy.deepcopy(model).double()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), [model[1].weight])
    (wanted,) = torch.autograd.grad(F.cross_entropy(exact(x.double()), y), [exact[1].weight])
    assert (grad - wanted).norm() > 100 * torch.finfo(torch.float32).eps * wanted.norm()
    assert verified(deep(blocks, seed), (x, y), perturbed)


def test_activation_on_the_other_side_of_zero_passes_verification():
    """A rounding error can set the derivative of a ReLU to 0, which changes the gradients by far more than epsilon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = batches(1)[0]
    bias = model[1].bias
    with torch.no_grad():
        bias[0] -= model[1].double()(x.flatten(1).double())[0, 0] - 1e-6
        model.float()

    def flips(run):
        def other(*inputs):
            (copied,) = (value for value in inputs if value.shape == bias.shape)
            for shift in (-2e-6, 2e-6):
                with torch.no_grad():
                    copied[0] += shift
                if shift < 0:
                    run(*inputs)

        return other

    results = []
    for change in (None, flips):
        trained = copy.deepcopy(model)
        captured, _ = capture(trained, (x, y), change)
        captured.code.run(*captured.inputs)
        results.append(trained[1].weight - model[1].weight)
    assert (results[0] - results[1]).norm() > 1e-3 * results[0].norm()
    assert verified(model, (x, y), flips)


def test_wrong_compiled_code_is_reported_as_a_compiler_bug():
    def skips_update(run):
        def other(*inputs):
            kept = inputs[0].detach().clone()
            run(*inputs)
            with torch.no_grad():
                inputs[0].copy_(kept)

        return other

    with pytest.raises(WrongNumbersError, match=r"the weight '\S+' changes by") as caught:
        verified(net(), batches(1)[0], skips_update)
    assert caught.value.compiler


def test_incomplete_graph_is_not_reported_as_a_compiler_bug():
    model, batch = net(), batches(1)[0]

    def eager(x, y):
        model[0].weight.register_hook(lambda grad: 1.01 * grad)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.1 * param.grad)

    with pytest.raises(WrongNumbersError, match=r"'0\.weight'") as caught:
        verified(model, batch, eager=eager)
    assert not caught.value.compiler


def test_autocast_is_compared_with_float64():
    """The rounding error of a bfloat16 step is a few percent, which is not a compiler bug."""
    model, (x, y) = net(), batches(1)[0]
    params = list(model.parameters())

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            torch._foreach_sub_(params, torch._foreach_mul(grads, 0.1))

    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(BaseException) as caught:  # noqa: PT011
        torch.compile(
            step, fullgraph=True, backend=lambda graph, _: GraphCode(graph, graph.forward, verified=False)
        )(x, y)
    verification = start(caught.value, {})
    exact = verification._references[-1]
    assert all(value.dtype == torch.float64 for value in exact if value.is_floating_point())
    step(x, y)
    assert verification.compare({}, {id(p) for p in params}, set())
