"""Tests of changes during training: loss scale settings, anomaly mode, inputs that require gradients, and replaced
layers of an averaged model."""

import logging

import pytest
import torch
import torch.nn.functional as F
from compiled_runs import COMPILE, DECAY, EMA, TOLERANCE, Base, batches, seed, sgd
from torch import nn

from slipstream import accelerate
from slipstream.errors import ModelError

HOW = {"eager": {}, "compiled": dict(compile=COMPILE)}


def grow(scaler):
    scaler.set_growth_interval(3)


def grow_faster(scaler):
    scaler.set_growth_factor(4.0)


def load(scaler):
    scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 3, "backoff_factor": 0.25})


@pytest.mark.parametrize("change", [grow, grow_faster, load])
@pytest.mark.parametrize("how", HOW)
def test_changed_loss_scale_settings_take_effect(how, change):
    def scales(step, scaler):
        scaler.load_state_dict(scaler.state_dict() | {"scale": 256.0, "growth_interval": 5})
        found = []
        for number, (x, y) in enumerate(batches(14), 1):
            if number == 6:
                change(scaler)
            step(x.float() * (torch.inf if number == 9 else 1), y.float())
            found.append(scaler.get_scale())
        return found

    def parts():
        seed()
        model = nn.Linear(4, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    model, optimizer = parts()
    step = accelerate(model, optimizer, F.mse_loss, speed=dict(precision="fp16", **HOW[how]))
    found = scales(lambda x, y: step((x, y)), step.optim.loss_scaler)
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu")

    def plain(x, y):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert found == scales(plain, scaler)
    assert len(set(found)) > 2


@pytest.mark.parametrize("how", HOW)
def test_anomaly_mode_raises_an_error_for_nan_in_backward(how):
    model = Base()
    # The gradient of sqrt is NaN for a negative number, although `where` discards the value.
    model.change = lambda x: torch.where(x > 0, x.sqrt(), x)
    step = accelerate(model, sgd(model), F.mse_loss, speed=HOW[how])
    ones = [(torch.ones_like(x) * 5, y) for x, y in batches()]
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.fill_(3.0)
    for batch in ones[:5]:
        step(batch)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.fill_(-1.0)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        step(ones[5])


@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("how", HOW)
def test_inputs_have_gradients_once_a_batch_requires_them(how, first):
    def gradients(step):
        found = []
        for number, (x, y) in enumerate(batches(), 1):
            x = x.clone().requires_grad_(number >= first)
            step(x, y)
            found.append(x.grad)
        return found

    seed()
    model = Base()
    step = accelerate(model, sgd(model), F.mse_loss, speed=HOW[how])
    found = gradients(lambda x, y: step((x, y)))
    seed()
    other = Base()
    optimizer = sgd(other)

    def plain(x, y):
        F.mse_loss(other(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = gradients(plain)
    assert [grad is None for grad in expected] == [number < first for number in range(1, len(expected) + 1)]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


def with_new_layer(step, model, optimizer, features=8):
    for number, batch in enumerate(batches(), 1):
        if number == 5:
            model.last = nn.Linear(features, 3).double()
            optimizer.param_groups[0]["params"] = list(model.parameters())
        step(batch)


@pytest.mark.parametrize("how", HOW)
def test_average_follows_a_replaced_layer(how):
    seed()
    model = Base()
    optimizer = sgd(model, momentum=0)
    step = accelerate(model, optimizer, F.mse_loss, speed=dict(HOW[how], ema=EMA))
    with_new_layer(step, model, optimizer)
    seed()
    other = Base()
    average = {}
    optimizer = sgd(other, momentum=0)

    def plain(batch):
        F.mse_loss(other(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in other.state_dict().items():
            average[name] = DECAY * average.get(name, value.clone()) + (1 - DECAY) * value

    with_new_layer(plain, other, optimizer)
    with step.averaged() as averaged:
        torch.testing.assert_close(dict(averaged.state_dict()), average, **TOLERANCE)


@pytest.mark.parametrize("how", HOW)
def test_average_raises_if_a_layer_with_a_different_shape_replaces_another(how):
    model = Base()
    optimizer = sgd(model)
    step = accelerate(model, optimizer, F.mse_loss, speed=dict(HOW[how], ema=EMA))
    step(batches()[0])
    model.last = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).double()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(ModelError, match="replace layers before creating the average"):
        step(batches()[1])


def test_warning_without_a_source_line_does_not_refer_to_one(caplog):
    model = Base()
    model.norm = nn.BatchNorm1d(8, momentum=None).double()
    model.change = lambda x: model.norm(x)
    with caplog.at_level(logging.WARNING, "slipstream"):
        step = accelerate(model, sgd(model), F.mse_loss, speed=dict(compile=COMPILE))
        for batch in batches():
            step(batch)
    messages = [
        record.getMessage()
        for record in caplog.records
        if "Only the model is compiled" in record.getMessage()
    ]
    assert len(messages) == 1
    assert ("change this line of code" in messages[0]) == (", at " in messages[0])
