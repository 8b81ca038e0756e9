"""What a step changed is put back whole, and a gradient that is not the eager one's is told from rounding."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graphs import batches, net
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.step.proof import Snapshot, compare, evidence, seen_gradients

SHOWN_BY = {
    "SGD": (partial(SGD, lr=0.1), "step"),
    "SGD with momentum": (partial(SGD, lr=0.1, momentum=0.9), "momentum_buffer"),
    "AdamW": (AdamW, "exp_avg"),
    "RMSprop": (RMSprop, "square_avg"),
    "Adagrad": (Adagrad, "sum"),
}


def take_step(model, optim, batch):
    optim.update_params(F.cross_entropy(model(batch[0]), batch[1]))


def held(model, optim):
    """Return copies of all that a step may change, with None for what does not exist."""
    state = {
        name: {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optim.optimizer.state[p].items()
        }
        for name, p in model.named_parameters()
        if p in optim.optimizer.state
    }
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {k: v.clone() for k, v in model.state_dict().items()}, state, grads, optim.progress


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- going back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
@pytest.mark.parametrize("done", [0, 3])
def test_a_step_is_undone_bit_for_bit(make, done):
    model = net()
    optim = OptimWrapper(make(model.parameters(), lr=0.1), clip_grad=dict(max_norm=1.0))
    for batch in batches(done):
        take_step(model, optim, batch)
    before, places = held(model, optim), [p.data_ptr() for p in model.state_dict().values()]
    saved = Snapshot(model, optim)
    take_step(model, optim, batches(1, seed=9)[0])
    assert not torch.equal(model[0].weight, before[0]["0.weight"])
    saved.restore()
    assert_equal(held(model, optim), before)
    assert [p.data_ptr() for p in model.state_dict().values()] == places


def test_the_gradients_of_a_window_come_back_where_they_were():
    model = net()
    optim = OptimWrapper(SGD(model.parameters(), lr=0.1), accumulative_counts=3)
    take_step(model, optim, batches()[0])
    before, grad = held(model, optim), model[0].weight.grad
    saved = Snapshot(model, optim)
    take_step(model, optim, batches()[1])
    take_step(model, optim, batches()[2])  # ends the window, and drops them
    assert model[0].weight.grad is None
    saved.restore()
    assert_equal(held(model, optim), before)
    assert model[0].weight.grad is grad


def test_numbers_that_forward_counts_up_come_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.share = nn.Linear(2, 1), 3, 0.5

        def forward(self, x):
            self.calls, self.share = self.calls + 1, self.share / 2
            return self.layer(x)

    model = Counting()
    saved = Snapshot(model, OptimWrapper(SGD(model.parameters(), lr=0.1)))
    model(torch.ones(1, 2))
    assert (model.calls, model.share) == (4, 0.25)
    saved.restore()
    assert (model.calls, model.share) == (3, 0.5)


def test_python_and_numpy_draw_the_same_again():
    model = net()
    saved = Snapshot(model, OptimWrapper(SGD(model.parameters(), lr=0.1)))
    drawn = random.random(), np.random.rand()
    saved.restore()
    assert (random.random(), np.random.rand()) == drawn


def test_a_choice_of_kernels_comes_back_with_the_state_that_goes_with_it():
    model = net()
    optim = OptimWrapper(AdamW(model.parameters()))
    saved = Snapshot(model, optim)
    optim.param_groups[0]["capturable"] = True  # as a graph on an accelerator wants it
    saved.restore()
    assert optim.param_groups[0]["capturable"] is False


def test_state_may_be_empty_or_hold_plain_numbers():
    model = nn.Linear(2, 1, bias=False)  # without buffers
    optim = OptimWrapper(SGD(model.parameters(), lr=0.1))
    state = optim.optimizer.state[model.weight]
    state.update(momentum_buffer=None, count=3)
    saved = Snapshot(model, optim)
    state.update(momentum_buffer=torch.ones(1, 2), count=4, extra=torch.ones(1))
    saved.restore()
    assert state == {"momentum_buffer": None, "count": 3}
    assert evidence(saved.params, optim, saved, ends=True).keys() == {"step"}


def test_the_loss_scale_is_among_what_else_is_given():
    model = net()
    optim = AmpOptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), dtype="float16", loss_scale=2.0**20)
    optim.loss_scaler.scale(torch.ones(()))
    scale = optim.loss_scaler._scale
    saved = Snapshot(model, optim, [scale])
    scale.fill_(3.0)
    saved.restore()
    assert float(scale) == 2.0**20


# ---- what shows a gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHOWN_BY)
def test_evidence_of_a_step_follows_its_gradients(kind):
    model, (make, name) = net(), SHOWN_BY[kind]
    optim = OptimWrapper(make(model.parameters()))
    saved = Snapshot(model, optim)
    take_step(model, optim, batches()[0])
    found = evidence(saved.params, optim, saved, ends=True)
    assert list(found) == [name, *(["step"] if kind == "SGD with momentum" else [])]
    assert {name for name, _ in found[name]} == {name for name, _ in model.named_parameters()}
    assert all(value.abs().sum() > 0 for _, value in found[name])


def test_evidence_within_a_window_is_the_gradient():
    model = net()
    optim = OptimWrapper(SGD(model.parameters(), lr=0.1, momentum=0.9), accumulative_counts=2)
    saved = Snapshot(model, optim)
    take_step(model, optim, batches()[0])
    found = evidence(saved.params, optim, saved, ends=False)
    assert_equal(dict(found["gradient"])["0.weight"], model[0].weight.grad)


def entries(**values):
    return {"momentum_buffer": [(name, torch.tensor(value)) for name, value in values.items()]}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (dict(a=[1.0, 2.0], b=[3.0]), ""),
        (dict(a=[1.01, 2.0], b=[3.0]), ""),  # rounding
        (dict(a=[0.0, 0.0], b=[3.0]), "momentum_buffer of 'a': 2.24e+00 off, of 2.24e+00"),
        (dict(a=[1.2, 2.0], b=[9.0]), "momentum_buffer of 'b'"),  # the worst is named
        (dict(a=[float("nan"), 2.0], b=[3.0]), "momentum_buffer of 'a'"),
        (dict(a=[1.0, 2.0]), "momentum_buffer of 'b' is missing"),
        ({}, "momentum_buffer of 'a' is missing"),
    ],
)
def test_other_gradients_contradict(found, wrong):
    says, message = compare(entries(a=[1.0, 2.0], b=[3.0]), entries(**found), 0.02)
    assert says
    assert message.startswith(wrong)
    assert bool(message) == bool(wrong)


def test_gradients_that_are_rounding_alone_contradict_nothing():
    """A bias before BatchNorm has no gradient but rounding, which no two kernels agree on."""
    says, wrong = compare(entries(a=[1.0, 2.0], bias=[1e-8]), entries(a=[1.0, 2.0], bias=[-3e-8]), 0.02)
    assert (says, wrong) == (True, "")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_step_that_was_left_out_says_nothing(value):
    assert compare(entries(a=[value]), entries(a=[5.0]), 0.02) == (False, "")


def test_those_that_get_a_gradient_are_seen_and_hooks_are_gone_afterwards():
    model, unused = net(), nn.Parameter(torch.ones(1))
    frozen = model[0].weight.requires_grad_(False)
    params = [*model.parameters(), unused]
    with seen_gradients(params) as seen:
        model(batches()[0][0]).sum().backward()
    assert seen == {*model.parameters()} - {frozen}
    seen.clear()
    model(batches()[0][0]).sum().backward()
    assert not seen


def test_rounding_of_single_tensors_is_borne_and_that_of_all_together_is_not():
    expected = entries(a=[10.0, 0.0], norm=[0.0, 1.0])
    assert compare(expected, entries(a=[10.0, 0.0], norm=[0.3, 1.0]), 0.2) == (True, "")
    says, message = compare(expected, entries(a=[10.0, 3.0], norm=[0.0, 1.0]), 0.2)
    assert says
    assert "of all parameters: 3.00e+00 off" in message
    assert "'norm'" in compare(expected, entries(a=[10.0, 0.0], norm=[0.0, 0.0]), 0.2)[1]
