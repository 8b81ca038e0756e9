"""Tests of the `fused` option, including resumed runs and overflows with a loss scale."""

import copy
import math

import pytest
import torch
from torch import nn

from accelerators import DEVICE, IS_CUDA, no_waiting
from slipstream import accelerate
from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.optim import kernels as kernels_module
from slipstream.optim.kernels import fuse

KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 1e-2, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 1e-2, "lr_decay": 0.01}),
}
by_kind = pytest.mark.parametrize("name", KINDS)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count, start=0):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 6, generator=generator) for _ in range(start + count)][start:]


def make(name, net, **options):
    kind, given = KINDS[name]
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]
    return kind(groups, **{**given, **options})


def train(wrapper, net, data, schedule=True):
    for x in data:
        with wrapper.optim_context(net):
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
        wrapper.update_params(loss)
        if schedule:
            for group in wrapper.param_groups:
                group["lr"] *= 0.9
    return net


def assert_close(one, two):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# ---- the option ---------------------------------------------------------------------------------------


@by_kind
@pytest.mark.parametrize("wanted", [True, None])
def test_fused_steps_match_unfused_steps(name, wanted):
    plain, net = make_net(), make_net()
    optimizer = make(name, net)
    assert fuse(optimizer, wanted) is True
    clip = {"max_norm": 0.1}
    train(OptimWrapper(make(name, plain), clip_grad=clip), plain, batches(10))
    train(OptimWrapper(optimizer, clip_grad=clip), net, batches(10))
    assert_close(net, plain)


@by_kind
def test_optimizer_with_state_can_be_fused(name):
    plain, net = make_net(), make_net()
    train(OptimWrapper(make(name, plain)), plain, batches(8))
    wrapper = OptimWrapper(make(name, net))
    train(wrapper, net, batches(4))
    fuse(wrapper.optimizer, True)
    train(wrapper, net, batches(4, start=4))
    assert_close(net, plain)


@pytest.mark.parametrize("choice", [{"foreach": True}, {"foreach": False}, {"fused": False}])
def test_none_keeps_the_configured_kernels(choice):
    optimizer = make("AdamW", make_net(), **choice)
    assert fuse(optimizer, None) is False
    key, value = next(iter(choice.items()))
    assert all(group[key] is value for group in optimizer.param_groups)


# ---- loss scale ---------------------------------------------------------------------------------


def scaled(name, net, fused, clip=None, **options):
    optimizer = make(name, net, **options)
    fuse(optimizer, fused)
    scale = {"init_scale": 1024.0, "growth_interval": 3}
    return AmpOptimWrapper(optimizer=optimizer, dtype="float16", loss_scale=scale, clip_grad=clip)


def overflow(wrapper, net):
    wrapper.update_params(sum(p.sum() for p in net.parameters()) * math.inf)


@by_kind
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.1}])
@pytest.mark.parametrize("when", [0, 3])
def test_fused_steps_skip_overflows_like_unfused_steps(name, clip, when):
    trained = []
    for fused in (False, True):
        net = make_net()
        wrapper = scaled(name, net, fused, clip)
        train(wrapper, net, batches(when))
        before = copy.deepcopy(net)
        overflow(wrapper, net)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
        train(wrapper, net, batches(5, start=when))
        trained.append((net, wrapper.loss_scaler.state_dict()))
    (plain, scale), (net, fused_scale) = trained
    assert_close(net, plain)
    assert fused_scale == scale


def test_overflow_in_the_first_step_does_not_create_momentum(monkeypatch):
    # PyTorch creates the momentum buffer with torch.empty_like, and a skipped step does not write to the buffer.
    net = make_net()
    wrapper = scaled("SGD", net, True)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **kwargs: torch.full_like(tensor, 1e20))
    overflow(wrapper, net)
    for p in net.parameters():
        assert "momentum_buffer" not in wrapper.optimizer.state.get(p, {})


def test_overflow_with_dampening_is_skipped_on_the_host():
    trained = []
    for fused in (False, True):
        net = make_net()
        wrapper = scaled("SGD", net, fused, dampening=0.5, nesterov=False)
        overflow(wrapper, net)
        trained.append(train(wrapper, net, batches(4)))
    assert_close(*trained)


@pytest.mark.gpu
@by_kind
def test_gpu_steps_do_not_wait_for_the_device(name):
    if name == "Adagrad" and IS_CUDA and not kernels_module._adagrad_runs_on_cuda():
        pytest.skip("requires torch 2.12 or newer")
    net = make_net().to(DEVICE)
    data = [x.to(DEVICE) for x in batches(6)]
    wrapper = AmpOptimWrapper(optimizer=make(name, net), dtype="float16", clip_grad={"max_norm": 0.1})
    train(wrapper, net, data[:2])
    with no_waiting():
        train(wrapper, net, data[2:])
    assert all(group["fused"] for group in wrapper.param_groups)


# ---- parameters that are trained later ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dampening": 0.5}, {"nesterov": True, "weight_decay": 0.1}])
@pytest.mark.parametrize("speed", ["auto", {"fused": True, "compile": {"backend": "aot_eager"}}])
def test_unfrozen_parameters_get_the_momentum_of_a_plain_loop(options, speed):
    net, reference = make_net(), make_net().double()
    first, second = (torch.optim.SGD(n.parameters(), 0.1, momentum=0.9, **options) for n in (net, reference))
    step = accelerate(net, first, lambda outputs, targets: outputs.square().mean(), speed)
    for index, x in enumerate(batches(6)):
        for n in (net, reference):
            n[0].requires_grad_(index > 2)
            n[2].requires_grad_(index != 4)
        reference(x.double()).square().mean().backward()
        second.step()
        second.zero_grad()
        step((x, x))
    for param, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)


def test_auto_trains_lazy_modules():
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyConv1d(2, 1))
    step = accelerate(net, torch.optim.Adam(net.parameters()), nn.MSELoss())
    assert step((torch.randn(2, 3, 5), torch.randn(2, 2, 4)))["loss"].isfinite()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_auto_trains_sparse_embeddings(kind):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=True), nn.Linear(4, 2))
        return model, kind(model.parameters(), lr=0.1)

    (ours, optimizer), (theirs, plain) = make(), make()
    step = accelerate(ours, optimizer, nn.functional.mse_loss)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randint(20, (6, 3), generator=generator), torch.randn(6, 2, generator=generator)
        step((x, y))
        plain.zero_grad()
        nn.functional.mse_loss(theirs(x), y).backward()
        plain.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-6)
