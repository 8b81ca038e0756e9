"""Tests that compare `OptimWrapper` with manual training loops in float64."""

import copy
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.errors import ModelError
from slipstream.optim import OptimWrapper
from slipstream.registry import OPTIM_WRAPPERS

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
]


def make_net(seed=0):
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


def make_batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def loss_of(net, x):
    return (net(x) ** 2).mean()


def groups(net, lr):
    return [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters()), "lr": lr * 3}]


def train_by_hand(net, cls, options, batches, window=1, clip=None, several=False):
    """Train with the mean gradient of each accumulation window, computed from one loss. Return the gradient norms."""
    optimizer = cls(groups(net, options["lr"]) if several else net.parameters(), **options)
    params = list(net.parameters())
    norms = []
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        grads = torch.autograd.grad(sum(loss_of(net, x) for x in part) / len(part), params)
        norm = torch.sqrt(sum((g**2).sum() for g in grads))
        norms.append(norm)
        if clip and clip.get("type", "norm") == "norm":
            grads = [g * min(1.0, clip["max_norm"] / (norm + 1e-6)) for g in grads]
        elif clip:
            grads = [g.clamp(-clip["clip_value"], clip["clip_value"]) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
    return norms


def train_wrapped(net, cls, options, batches, window=1, clip=None, several=False):
    params = groups(net, options["lr"]) if several else net.parameters()
    wrapper = OptimWrapper(cls(params, **options), window, clip)
    wrapper.initialize_count_status(net, 0, len(batches))
    norms = []
    for x in batches:
        wrapper.update_params(loss_of(net, x))
        norms.append(wrapper.grad_norm)
    return norms


def assert_same(one, two, tolerance=1e-12):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


CLIPS = [None, {"max_norm": 0.1}, {"max_norm": 1000.0}, {"type": "value", "clip_value": 0.01}]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_training_matches_a_manual_loop(cls, options, clip, several):
    net = make_net()
    hand = copy.deepcopy(net)
    batches = make_batches(7)
    train_by_hand(hand, cls, options, batches, 1, clip, several)
    train_wrapped(net, cls, options, batches, 1, clip, several)
    assert_same(net, hand)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from(OPTIMIZERS), st.sampled_from(CLIPS))
def test_accumulation_uses_the_mean_gradient_of_each_window(count, window, optimizer, clip):
    net = make_net()
    hand = copy.deepcopy(net)
    batches = make_batches(count)
    train_by_hand(hand, *optimizer, batches, window, clip)
    train_wrapped(net, *optimizer, batches, window, clip)
    assert_same(net, hand)


def test_resumed_run_keeps_the_accumulation_windows():
    batches = make_batches(7)
    whole, resumed = make_net(), make_net()
    train_wrapped(whole, torch.optim.SGD, {"lr": 0.1}, batches, 3)
    for start, stop in ((0, 3), (3, 7)):
        wrapper = OptimWrapper(torch.optim.SGD(resumed.parameters(), lr=0.1), 3)
        wrapper.initialize_count_status(resumed, start, 7)
        for x in batches[start:stop]:
            wrapper.update_params(loss_of(resumed, x))
    assert_same(whole, resumed)


def test_an_extended_run_divides_by_the_number_of_batches_since_the_last_update():
    batches = make_batches(11)
    hand, net = make_net(), make_net()
    optimizer = torch.optim.SGD(hand.parameters(), 0.1)
    for window in (range(4), range(4, 6), range(6, 8), range(8, 11)):  # the first run ends after 6 batches
        optimizer.zero_grad()
        (sum(loss_of(hand, batches[i]) for i in window) / len(window)).backward()
        optimizer.step()
    unfinished, window = 0, None
    for start, stop, total in ((0, 6, 6), (6, 7, 11), (7, 11, 11)):
        wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), 0.1), 4)
        wrapper.initialize_count_status(net, start, total)
        wrapper.resume_window(unfinished, window)
        for x in batches[start:stop]:
            wrapper.update_params(loss_of(net, x))
        unfinished, window = wrapper.accumulation.unfinished, wrapper.accumulation.size
        assert wrapper.begins_window() == (stop != 7)
    assert_same(net, hand)


def test_grad_norm_is_the_norm_before_clipping_and_none_without_clipping():
    batches = make_batches(4)
    hand = train_by_hand(make_net(), torch.optim.SGD, {"lr": 0.1}, batches, clip={"max_norm": 0.1})
    norms = train_wrapped(make_net(), torch.optim.SGD, {"lr": 0.1}, batches, clip={"max_norm": 0.1})
    torch.testing.assert_close(norms, hand, rtol=1e-12, atol=0)
    assert norms[0].ndim == 0
    assert norms[0] > 0.1
    for clip in (None, {"type": "value", "clip_value": 1.0}):
        assert train_wrapped(make_net(), torch.optim.SGD, {"lr": 0.1}, batches, clip=clip) == [None] * 4


def test_overridden_zero_grad_of_the_optimizer_is_called():
    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none=True):
            self.calls += 1
            super().zero_grad(set_to_none)

    param = nn.Parameter(torch.ones(2))
    optimizer = Counting([param], lr=0.1)
    OptimWrapper(optimizer).update_params(param.sum())
    assert optimizer.calls == 1
    assert param.grad is None


# ---- gradient sync -----------------------------------------------------------------------------------


class Synced(nn.Linear):
    """A mock DDP model that records whether each forward pass runs outside `no_sync`."""

    def __init__(self):
        super().__init__(2, 1)
        self.syncing, self.seen = True, []

    @contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True

    def forward(self, x):
        self.seen.append(self.syncing)
        return super().forward(x).sum()


@pytest.mark.parametrize(
    ("window", "count", "synced"),
    [
        (1, 3, [True, True, True]),
        (2, 4, [False, True, False, True]),
        (3, 7, [False, False, True, False, False, True, True]),
        (4, 3, [False, False, True]),
        (3, -1, [False, False, True, False, False, True, False, False]),
    ],
)
@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_gradients_are_synced_only_in_the_last_batch_of_each_window(kind, window, count, synced):
    model = Synced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = OPTIM_WRAPPERS.build({"type": kind, "optimizer": optimizer, "accumulative_counts": window})
    wrapper.initialize_count_status(model, 0, count)
    expected_updates = []
    for _ in synced:
        expected_updates.append(wrapper.should_sync())
        with wrapper.optim_context(model):
            loss = model(torch.ones(1, 2))
        wrapper.backward(loss)
        assert wrapper.should_update() == expected_updates[-1]
    assert model.seen == synced == expected_updates
    assert model.syncing


# ---- invalid arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_first_window_must_reach_a_parameter_of_the_optimizer(window):
    own, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    wrapper = OptimWrapper(torch.optim.SGD([own], lr=0.1), window)
    for _ in range(window - 1):
        wrapper.update_params(other.sum())
    with pytest.raises(ModelError, match="does not depend on any of the optimizer's parameters"):
        wrapper.update_params(other.sum())
    wrapper.update_params(own.sum())
    for _ in range(window):
        wrapper.update_params(other.sum())  # only the first window is checked


# ---- accessors ----------------------------------------------------------------------------------


def test_state_dict_restores_the_optimizer():
    batches = make_batches(6)
    options = {"lr": 0.05, "momentum": 0.9}
    whole = make_net()
    train_wrapped(whole, torch.optim.SGD, options, batches)
    net = make_net()
    first = OptimWrapper(torch.optim.SGD(net.parameters(), **options))
    for x in batches[:3]:
        first.update_params(loss_of(net, x))
    second = OptimWrapper(torch.optim.SGD(net.parameters(), **options))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for x in batches[3:]:
        second.update_params(loss_of(net, x))
    assert_same(net, whole, 0)
