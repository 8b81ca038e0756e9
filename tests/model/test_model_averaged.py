import copy

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.model import ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage
from slipstream.registry import MODELS

STEPS = 50


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def walk(model, rng):
    """Change every parameter and buffer, as training would."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.add_(torch.from_numpy(rng.normal(size=tuple(tensor.shape))).float())
        else:
            tensor.add_(1)


def history(average, model):
    """Walk and average; return all the states of the model, in float64."""
    rng, states = np.random.default_rng(0), []
    for _ in range(STEPS):
        walk(model, rng)
        states.append({name: t.detach().double().numpy().copy() for name, t in model.state_dict().items()})
        average.update_parameters(model)
    return states


def ema(values, momentum, interval):
    result = values[0]
    for step in range(interval, len(values), interval):
        share = momentum(step)
        result = (1 - share) * result + share * values[step]
    return result


AVERAGES = [
    (ExponentialMovingAverage, dict(momentum=0.1), lambda values, n: ema(values, lambda _: 0.1, n)),
    (
        MomentumAnnealingEMA,
        dict(momentum=0.2, gamma=5),
        lambda values, n: ema(values, lambda step: max(0.2, 5 / (5 + step)), n),
    ),
    (StochasticWeightAverage, dict(), lambda values, n: np.mean(values[::n], axis=0)),
]


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(("kind", "options", "formula"), AVERAGES)
def test_fifty_steps_follow_the_formula(kind, options, formula, interval):
    model = network()
    average = kind(model, interval=interval, **options)
    states = history(average, model)
    for name, tensor in average.module.named_parameters():
        wanted = formula([state[name] for state in states], interval)
        np.testing.assert_allclose(tensor.double().numpy(), wanted, atol=1e-5, err_msg=name)
        assert not np.allclose(wanted, states[-1][name], atol=1e-2), "the average lags behind the model"
        assert not np.allclose(wanted, states[0][name], atol=1e-2), "the average moves"


def test_updating_leaves_the_model_as_it_is():
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.5)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        average.update_parameters(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_buffers_are_the_models_own_unless_asked_for():
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.1)
    states = history(average, model)
    average.copy_buffers(model)
    assert np.array_equal(average.module[1].running_mean.numpy(), states[-1]["1.running_mean"].astype("f4"))
    assert average.module[1].num_batches_tracked == STEPS


def test_with_update_buffers_floating_point_buffers_are_averaged_and_counts_are_copied():
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.1, update_buffers=True)
    states = history(average, model)
    average.copy_buffers(model)
    wanted = ema([state["1.running_var"] for state in states], lambda _: 0.1, 1)
    np.testing.assert_allclose(average.module[1].running_var.double().numpy(), wanted, atol=1e-5)
    assert average.module[1].num_batches_tracked == STEPS


@pytest.mark.parametrize("update_buffers", [False, True])
def test_swap_exchanges_storages_without_copying_and_twice_is_nothing(update_buffers):
    model = network()
    average = ExponentialMovingAverage(model, momentum=0.1, update_buffers=update_buffers)
    history(average, model)

    def places(module):
        tensors = [*module.parameters(), *(module.buffers() if update_buffers else ())]
        return [t.data_ptr() for t in tensors if t.is_floating_point()]

    parameters = [id(p) for p in model.parameters()]
    mine, theirs = places(average.module), places(model)
    assert set(mine).isdisjoint(theirs)
    average.swap(model)
    assert (places(average.module), places(model)) == (theirs, mine)
    assert [id(p) for p in model.parameters()] == parameters, "an optimizer's references stay valid"
    average.swap(model)
    assert (places(average.module), places(model)) == (mine, theirs)


def test_the_copy_of_a_compiled_model_runs_eagerly_and_needs_no_gradient():
    model = nn.Linear(2, 2)
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model.compile(backend=backend)
    average = ExponentialMovingAverage(model)
    average(torch.ones(1, 2))
    assert not calls
    assert average.module._compiled_call_impl is None
    assert not any(p.requires_grad for p in average.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_a_state_dict_brings_average_and_step_count_back():
    model = network()
    average = MomentumAnnealingEMA(model, momentum=0.01, gamma=3)
    history(average, model)
    state = copy.deepcopy(average.state_dict())
    assert int(state["steps"]) == STEPS

    other = MomentumAnnealingEMA(network(), momentum=0.01, gamma=3)
    assert not any(other.load_state_dict(state, strict=True))
    assert other.steps == STEPS
    assert "steps" in state, "the caller's dict stays whole"
    walk(model, np.random.default_rng(1))
    average.update_parameters(model)
    other.update_parameters(model)
    for ours, theirs in zip(average.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_average_can_be_built_by_name():
    average = MODELS.build(
        dict(type="StochasticWeightAverage", interval=2), default_args={"model": network()}
    )
    assert isinstance(average, StochasticWeightAverage)
    assert average.interval == 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ExponentialMovingAverage, dict(momentum=0.0)),
        (ExponentialMovingAverage, dict(momentum=1.0)),
        (ExponentialMovingAverage, dict(interval=0)),
        (MomentumAnnealingEMA, dict(gamma=0)),
    ],
)
def test_values_outside_their_range_are_refused(kind, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        kind(network(), **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_average_on_the_cpu_of_a_model_on_the_gpu_updates_and_swaps():
    model = network().cuda()
    average = ExponentialMovingAverage(model, momentum=0.5, device="cpu")
    start = model[0].weight.detach().cpu().clone()
    average.update_parameters(model)
    model[0].weight.data.add_(1)
    average.update_parameters(model)
    torch.testing.assert_close(average.module[0].weight, start + 0.5)
    average.swap(model)
    torch.testing.assert_close(model[0].weight.detach().cpu(), start + 0.5)
    assert model[0].weight.is_cuda
    torch.testing.assert_close(average.module[0].weight, start + 1)
