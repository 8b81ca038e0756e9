import copy

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from slipstream.errors import ConfigError
from slipstream.model import (
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    ScheduledEMA,
    StochasticWeightAverage,
)

STEPS = 50


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def walk(model, rng):
    """Change every parameter and buffer, as a training step does."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.add_(torch.from_numpy(rng.normal(size=tuple(tensor.shape))).float())
        else:
            tensor.add_(1)


def history(average, model):
    """Change the model and update the average STEPS times. Return the model's states in float64."""
    rng, states = np.random.default_rng(0), []
    for _ in range(STEPS):
        walk(model, rng)
        states.append({name: t.detach().double().numpy().copy() for name, t in model.state_dict().items()})
        average.update_parameters(model)
    return states


def ema(values, momentum, interval):
    result = values[0]
    for step in range(interval, len(values), interval):
        weight = momentum(step)
        result = (1 - weight) * result + weight * values[step]
    return result


AVERAGES = [
    (ExponentialMovingAverage, dict(momentum=0.1), lambda values, n: ema(values, lambda _: 0.1, n)),
    (
        MomentumAnnealingEMA,
        dict(momentum=0.2, gamma=5),
        lambda values, n: ema(values, lambda step: max(0.2, 5 / (5 + step)), n),
    ),
    (StochasticWeightAverage, dict(), lambda values, n: np.mean(values[::n], axis=0)),
    (
        ScheduledEMA,
        dict(decay=0.8, decay_type="constant"),
        lambda values, n: ema(values, lambda _: 1 - 0.8, n),
    ),
    (
        ScheduledEMA,
        dict(decay=0.7, decay_type="threshold"),  # the decay is constant from update 20 on
        lambda values, n: ema(values, lambda step: 1 - min(0.7, (2 + step) / (11 + step)), n),
    ),
    (
        ScheduledEMA,
        dict(decay=0.9, decay_type="exp", beta=4.0),
        lambda values, n: ema(values, lambda step: 1 - 0.9 * (1 - np.exp(-4 * (step + 1) / STEPS)), n),
    ),
]


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(("kind", "options", "formula"), AVERAGES)
def test_average_matches_the_formula_over_fifty_steps(kind, options, formula, interval):
    model = network()
    average = kind(model, interval=interval, **options)
    average.total_steps = STEPS
    states = history(average, model)
    for name, tensor in average.module.named_parameters():
        wanted = formula([state[name] for state in states], interval)
        np.testing.assert_allclose(tensor.double().numpy(), wanted, atol=1e-5, err_msg=name)
        assert not np.allclose(wanted, states[-1][name], atol=1e-2), (
            "the average is too close to the last weights"
        )
        assert not np.allclose(wanted, states[0][name], atol=1e-2), (
            "the average is too close to the first weights"
        )


def test_buffers_are_copied_by_default():
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.1)
    states = history(average, model)
    average.copy_buffers(model)
    assert np.array_equal(average.module[1].running_mean.numpy(), states[-1]["1.running_mean"].astype("f4"))
    assert average.module[1].num_batches_tracked == STEPS


def test_update_buffers_averages_floating_point_buffers_and_copies_counts():
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.1, update_buffers=True)
    states = history(average, model)
    average.copy_buffers(model)
    wanted = ema([state["1.running_var"] for state in states], lambda _: 0.1, 1)
    np.testing.assert_allclose(average.module[1].running_var.double().numpy(), wanted, atol=1e-5)
    assert average.module[1].num_batches_tracked == STEPS


@pytest.mark.parametrize("update_buffers", [False, True])
def test_swap_exchanges_storages_and_a_second_swap_restores_them(update_buffers):
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.1, update_buffers=update_buffers)
    history(average, model)

    def pointers(module):
        tensors = [*module.parameters(), *(module.buffers() if update_buffers else ())]
        return [t.data_ptr() for t in tensors if t.is_floating_point()]

    parameters = [id(p) for p in model.parameters()]
    mine, theirs = pointers(average.module), pointers(model)
    assert set(mine).isdisjoint(theirs)
    average.swap_in(model, average=True)
    assert (pointers(average.module), pointers(model)) == (theirs, mine)
    assert [id(p) for p in model.parameters()] == parameters, "swap replaced the model's parameters"
    average.swap_in(model, average=False)
    assert (pointers(average.module), pointers(model)) == (mine, theirs)


def test_state_dict_restores_average_and_step_count():
    model = network()
    average = MomentumAnnealingEMA(model, momentum=0.01, gamma=3)
    history(average, model)
    state = copy.deepcopy(average.state_dict())
    assert int(state["steps"]) == STEPS

    other = MomentumAnnealingEMA(network(), momentum=0.01, gamma=3)
    assert not any(other.load_state_dict(state, strict=True))
    assert other.steps == STEPS
    assert "steps" in state, "load_state_dict changed the caller's dict"
    walk(model, np.random.default_rng(1))
    average.update_parameters(model)
    other.update_parameters(model)
    for ours, theirs in zip(average.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class SpecialTensors(nn.Module):
    """A module with tied and frozen weights, and every kind of buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("grid", torch.arange(3.0), persistent=False)


def test_tied_weights_remain_tied_and_are_averaged_once():
    model = SpecialTensors()
    average = ExponentialMovingAverage(model, momentum=0.5)
    average.update_parameters(model)
    start = model.first.weight.detach().clone()
    with torch.no_grad():
        model.first.weight += 2
    average.update_parameters(model)
    assert average.module.last.weight is average.module.first.weight
    torch.testing.assert_close(average.module.first.weight, start + 1)
    average.swap_in(model, average=True)
    assert model.last.weight is model.first.weight
    torch.testing.assert_close(model.last.weight.detach(), start + 1)


def test_only_saved_finite_floating_point_buffers_are_averaged():
    model = SpecialTensors()
    average = ScheduledEMA(model, decay=0.5, decay_type="constant")
    for _ in range(3):
        average.update_parameters(model)
        model.mean += 1
        model.grid += 1
        model.count += 1
    average.copy_buffers(model)
    kept = average.module
    assert kept.mean.tolist() == [1.25] * 3  # EMA of 0, 1, 2 with weight 1/2: ((0 + 1) / 2 + 2) / 2
    assert torch.equal(kept.grid, model.grid)
    assert kept.count == 3
    assert torch.equal(kept.mask, model.mask), "the mask was averaged, which turns -inf into NaN"
    average.swap_in(model, average=True)
    assert model.mean.tolist() == [1.25] * 3
    assert model.grid.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("kind", "options"), [(ExponentialMovingAverage, dict(momentum=1e-4)), (ScheduledEMA, dict(decay=0.9999))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_with_insufficient_precision_raise_an_error(kind, options, dtype):
    with pytest.raises(ConfigError, match=r"^(momentum|decay): the average of '0.weight' would not change"):
        kind(network().to(dtype), **options)
    kind(network().to(dtype), **dict.fromkeys(options, 0.5))
    kind(network(), **options)
