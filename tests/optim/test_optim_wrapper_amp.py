"""Test that training with `AmpOptimWrapper` on the CPU is bitwise identical to manual loops with torch.amp."""

import copy

import pytest
import torch
from torch import nn

from slipstream.optim import AmpOptimWrapper


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def make_batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 6, generator=generator) for _ in range(count)]


def loss_of(net, x):
    return nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(net, batches, **options):
    wrapper = AmpOptimWrapper(optimizer=sgd(net), **options)
    wrapper.initialize_count_status(net, 0, len(batches))
    losses = []
    for x in batches:
        with wrapper.optim_context(net):
            loss = loss_of(net, x)
        wrapper.update_params(loss)
        losses.append(loss.detach())
    return wrapper, losses


def by_hand(net, batches, dtype, scaler=None, window=1, max_norm=None, new_scale=None):
    optimizer = sgd(net)
    losses = []
    for number, x in enumerate(batches, 1):
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(net, x)
        losses.append(loss.detach())
        last = len(batches) - len(batches) % window
        loss = loss / (window if number <= last else len(batches) % window)
        (scaler.scale(loss) if scaler else loss).backward()
        if number % window and number != len(batches):
            continue
        if max_norm:
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update(new_scale)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_identical(one, two):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


CASES = [
    {},
    {"clip_grad": {"max_norm": 0.05}},
    {"accumulative_counts": 3},
    {"accumulative_counts": 2, "clip_grad": {"max_norm": 0.05}},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "bf16", torch.bfloat16])
def test_bfloat16_matches_a_loop_with_autocast_and_has_no_scaler(dtype, options):
    net = make_net()
    hand = copy.deepcopy(net)
    batches = make_batches(7)
    wrapper, losses = train(net, batches, dtype=dtype, **options)
    clip = options.get("clip_grad", {}).get("max_norm")
    expected = by_hand(hand, batches, torch.bfloat16, None, options.get("accumulative_counts", 1), clip)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert_identical(net, hand)
    assert wrapper.loss_scaler is None
    assert wrapper.dtype == torch.bfloat16
    assert "loss_scaler" not in wrapper.state_dict()
    # the loss was computed in bfloat16
    assert not torch.equal(losses[0], loss_of(make_net(), batches[0]).detach())


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(
    ("loss_scale", "scaler_options", "new_scale"),
    [
        ("dynamic", {}, None),
        (128.0, {"init_scale": 128.0}, 128.0),
        (64, {"init_scale": 64.0}, 64.0),
        ({"init_scale": 32.0, "growth_interval": 2}, {"init_scale": 32.0, "growth_interval": 2}, None),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", torch.float16])
def test_float16_matches_a_loop_with_a_grad_scaler(dtype, loss_scale, scaler_options, new_scale, options):
    net = make_net()
    hand = copy.deepcopy(net)
    batches = make_batches(7)
    wrapper, losses = train(net, batches, dtype=dtype, loss_scale=loss_scale, **options)
    scaler = torch.amp.GradScaler("cpu", **scaler_options)
    clip = options.get("clip_grad", {}).get("max_norm")
    expected = by_hand(
        hand, batches, torch.float16, scaler, options.get("accumulative_counts", 1), clip, new_scale
    )
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert_identical(net, hand)
    assert wrapper.loss_scaler.state_dict() == scaler.state_dict()
    if new_scale:
        assert wrapper.loss_scaler.get_scale() == new_scale


@pytest.mark.parametrize("clip", [None, {"max_norm": 1.0}])
def test_overflow_skips_the_step_and_halves_the_scale(clip):
    net = make_net()
    wrapper = AmpOptimWrapper(
        optimizer=sgd(net), dtype="float16", loss_scale={"init_scale": 1024.0}, clip_grad=clip
    )
    before = copy.deepcopy(net)
    wrapper.update_params(net[0].weight.sum() * float("inf"))
    assert_identical(net, before)
    assert not wrapper.optimizer.state
    assert wrapper.loss_scaler.get_scale() == 512.0
    assert all(p.grad is None for p in net.parameters())
    wrapper.update_params(net[0].weight.sum())  # the next step updates the weights
    assert not torch.equal(net[0].weight, before[0].weight)


def test_fixed_scale_does_not_change_after_an_overflow():
    net = make_net()
    wrapper = AmpOptimWrapper(optimizer=sgd(net), dtype="float16", loss_scale=8.0)
    wrapper.update_params(net[0].weight.sum() * float("inf"))
    assert wrapper.loss_scaler.get_scale() == 8.0


def test_grad_norm_uses_unscaled_gradients():
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    wrapper = AmpOptimWrapper(
        optimizer=torch.optim.SGD([param], lr=0.0), dtype="fp16", clip_grad={"max_norm": 1.0}
    )
    wrapper.update_params((param**2).sum() / 2)
    assert wrapper.grad_norm == pytest.approx(5.0)


def test_state_dict_restores_the_loss_scaler():
    options = {"dtype": "float16", "loss_scale": {"init_scale": 16.0, "growth_interval": 2}}
    batches = make_batches(5)
    whole = make_net()
    reference, _ = train(whole, batches, **options)
    net = make_net()
    first, _ = train(net, batches[:3], **options)
    saved = copy.deepcopy(first.state_dict())
    assert saved["loss_scaler"]["scale"] == 32.0
    second = AmpOptimWrapper(optimizer=sgd(net), **options)
    second.load_state_dict(saved)
    for x in batches[3:]:
        with second.optim_context(net):
            loss = loss_of(net, x)
        second.update_params(loss)
    assert_identical(net, whole)
    assert second.loss_scaler.state_dict() == reference.loss_scaler.state_dict()
    assert "loss_scaler" in saved  # loading does not change the caller's dict


def test_gradients_that_the_user_has_unscaled_are_not_unscaled_again():
    batches, net, hand = make_batches(4), make_net(), make_net()
    wrapper = AmpOptimWrapper(optimizer=sgd(net), dtype="float16")
    for x in batches:
        with wrapper.optim_context(net):
            loss = loss_of(net, x)
        wrapper.backward(loss)
        wrapper.loss_scaler.unscale_(wrapper.optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        wrapper.step()
        wrapper.zero_grad()
    by_hand(hand, batches, torch.float16, torch.amp.GradScaler("cpu"), max_norm=0.5)
    for ours, theirs in zip(net.parameters(), hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)
