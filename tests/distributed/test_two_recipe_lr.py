"""Test that a recipe's per-prefix learning rates and schedule give the same results in two processes as in one."""

import pytest
import torch
from two_processes import run_in_two
from two_trainings import train

from slipstream.training.optimizers import optim_wrapper
from slipstream.training.params import TrainingParams
from slipstream.training.schedules import lr_schedules

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

RATES = {"first": 0.01, "middle": 0.05, "default": 0.2}
PARAMS = TrainingParams.read(
    dict(
        initial_lr=RATES,
        lr_mode="PolyLRScheduler",
        lr_warmup_epochs=1,
        max_epochs=3,
        zero_weight_decay_on_bias_and_bn=True,
        optimizer_params=dict(weight_decay=0.1, momentum=0.9),
    )
)


def trained(folder, world, **speed):
    runner = train(
        folder,
        world,
        max_epochs=3,
        optim_wrapper=optim_wrapper(PARAMS),
        param_scheduler=lr_schedules(PARAMS),
        speed=speed,
    )
    names = {id(p): name.removeprefix("module.") for name, p in runner.model.named_parameters()}
    groups = runner.optim_wrapper.param_groups
    rates = {names[id(p)]: float(g["lr"]) / g["initial_lr"] for g in groups for p in g["params"]}
    initial = {names[id(p)]: g["initial_lr"] for g in groups for p in g["params"]}
    weights = {k.removeprefix("module."): v.clone() for k, v in runner.model.state_dict().items()}
    return weights, initial, rates, type(runner.step).__name__


def eager(folder):
    return trained(folder, 2)


def compiled(folder):
    return trained(folder, 2, compile=dict(scope="step", backend="eager"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe_lr")
    return trained(folder / "one", 1), run_in_two([eager, compiled], folder)


@pytest.mark.parametrize(("name", "step"), [("eager", "EagerStep"), ("compiled", "GraphStep")])
def test_learning_rates_by_prefix_in_two_processes_match_one_process(answers, name, step):
    (weights, initial, rates, _), of_ranks = answers
    for answer in of_ranks[name]:
        assert not isinstance(answer, str), answer
        assert answer[1] == initial == {key: RATES.get(key.partition(".")[0], 0.2) for key in weights}
        assert answer[2] == rates
        assert answer[3] == step
        torch.testing.assert_close(answer[0], weights, rtol=1e-4, atol=1e-6)
