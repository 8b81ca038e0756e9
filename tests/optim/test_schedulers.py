"""Tests of parameter schedulers: active steps, resuming, tensor values, momentum and plateaus."""

import json

import pytest
import torch
from scheduled import history, parameter, sgd, sgd_with_tensors

from slipstream.errors import CheckpointError, ConfigError
from slipstream.optim import scheduler as schedules
from slipstream.optim.scheduler import (
    CosineAnnealingLR,
    CosineAnnealingMomentum,
    CosineRestartLR,
    ExponentialLR,
    ExponentialMomentum,
    LinearParamScheduler,
    MultiStepLR,
    ReduceOnPlateauLR,
    StepLR,
    StepMomentum,
)
from slipstream.registry import PARAM_SCHEDULERS

FAMILIES = [
    "Constant",
    "CosineAnnealing",
    "CosineRestart",
    "Exponential",
    "Linear",
    "MultiStep",
    "Poly",
    "ReduceOnPlateau",
    "Step",
]
NAMES = [f + kind for f in FAMILIES for kind in ("ParamScheduler", "LR", "Momentum")]
NAMES += ["OneCycleParamScheduler", "OneCycleLR"]

# Every scheduler with its required arguments. All can be built in any order on one optimizer.
ALL_LR = {
    "ConstantLR": {"factor": 0.5, "end": 7},
    "CosineAnnealingLR": {"T_max": 9, "eta_min": 0.001},
    "CosineRestartLR": {"periods": [4, 8, 9], "restart_weights": [1, 0.5, 0.25], "eta_min_ratio": 0.1},
    "ExponentialLR": {"gamma": 0.97},
    "LinearLR": {"start_factor": 0.1, "begin": 2, "end": 9},
    "MultiStepLR": {"milestones": [3, 8], "gamma": 0.3},
    "OneCycleLR": {"eta_max": 0.3, "total_steps": 15},
    "PolyLR": {"power": 0.9, "end": 18},
    "StepLR": {"step_size": 4, "gamma": 0.6},
}


@pytest.mark.parametrize("name", NAMES)
def test_all_mmengine_names_are_registered_and_importable(name):
    assert PARAM_SCHEDULERS.get(name) is getattr(schedules, name)
    assert PARAM_SCHEDULERS.get(name).__module__.startswith("slipstream.")


def test_scheduler_is_active_only_between_begin_and_end():
    optimizer = sgd()
    scheduler = ExponentialLR(optimizer, gamma=0.5, begin=2, end=5)
    values = [v[0] for v in history(optimizer, [scheduler], 8)]
    assert values == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.025, 0.025, 0.025, 0.025])


def test_every_group_option_can_be_scheduled():
    optimizer = sgd(weight_decay=0.1)
    LinearParamScheduler(optimizer, "weight_decay", 0.25, 1.0, end=5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.025])


def test_cosine_restart_is_constant_after_the_last_period():
    optimizer = sgd()
    values = history(optimizer, [CosineRestartLR(optimizer, [3, 2], [1, 0.5])], 9)
    assert [v[0] for v in values[3:]] == pytest.approx([0.05, 0.025, 0.025, 0.025, 0.025, 0.025])


# ---- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, sgd_with_tensors], ids=["floats", "tensors"])
@pytest.mark.parametrize("names", [[name] for name in ALL_LR] + [["LinearLR", "PolyLR", "StepLR"]], ids=str)
@pytest.mark.parametrize("done", [0, 5])
def test_resumed_values_match_an_uninterrupted_run(make, names, done):
    def build(optimizer):
        return [getattr(schedules, name)(optimizer, **ALL_LR[name]) for name in names]

    first = make()
    chain = build(first)
    history(first, chain, done)
    saved = [scheduler.state_dict() for scheduler in chain]
    saved_optimizer = first.state_dict()
    assert json.loads(json.dumps(saved)) == saved  # plain values only

    second = make(lr=0.7)  # the checkpoint must override this value
    resumed = build(second)
    second.load_state_dict(saved_optimizer)
    for scheduler, state in zip(resumed, saved, strict=True):
        scheduler.load_state_dict(state)
    for _ in range(12):
        for mine, yours in zip(chain, resumed, strict=True):
            mine.step()
            yours.step()
            assert mine.get_last_value() == yours.get_last_value()


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer, end: CosineAnnealingLR(optimizer, T_max=8, end=end),
        lambda optimizer, end: ExponentialLR(optimizer, gamma=0.5, begin=1, end=end),
        lambda optimizer, end: MultiStepLR(optimizer, milestones=[2, 3, 5], gamma=0.1, end=end),
    ],
    ids=["cosine", "exponential", "multistep"],
)
def test_a_run_that_is_extended_continues_the_schedule_without_a_delay(make):
    """By default, `end` is the run's length. A run omits its last scheduler step; an extended run must perform it."""
    done = 2

    def values(scheduler, steps):
        for _ in range(steps):
            scheduler.step()
            yield scheduler.optimizer.param_groups[0]["lr"]

    whole = list(values(make(sgd(), 8), 7))
    shorter = make(sgd(), 2)
    list(values(shorter, done))
    optimizer = sgd()
    extended = make(optimizer, 8)
    optimizer.load_state_dict(shorter.optimizer.state_dict())
    extended.load_state_dict(shorter.state_dict())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(whole[done - 1], rel=1e-12)
    assert list(values(extended, 7 - done)) == pytest.approx(whole[done:], rel=1e-12)


def test_state_of_a_different_scheduler_or_number_of_groups_raises_an_error():
    scheduler = ReduceOnPlateauLR(sgd())
    with pytest.raises(CheckpointError, match="best"):
        scheduler.load_state_dict(StepLR(sgd(), 2).state_dict())
    one_group = torch.optim.SGD([parameter()], lr=0.1)
    with pytest.raises(CheckpointError, match="2 parameter groups, but the optimizer has 1"):
        StepLR(one_group, 2).load_state_dict(StepLR(sgd(), 2).state_dict())


# ---- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_LR)
def test_tensor_is_filled_in_place_with_the_same_values_as_a_float(name):
    optimizer, plain = sgd_with_tensors(), sgd()
    tensors = [group["lr"] for group in optimizer.param_groups]
    scheduler = getattr(schedules, name)(optimizer, **ALL_LR[name])
    expected = getattr(schedules, name)(plain, **ALL_LR[name])
    for _ in range(25):
        scheduler.step()
        expected.step()
        assert scheduler.get_last_value() == pytest.approx(expected.get_last_value(), rel=1e-6)
        for group, tensor, value in zip(
            optimizer.param_groups, tensors, scheduler.get_last_value(), strict=True
        ):
            assert group["lr"] is tensor
            assert tensor.item() == pytest.approx(value, rel=1e-6)


@pytest.fixture
def forbid_reading(monkeypatch):
    def refuse(self):
        raise AssertionError("a scheduler read a tensor; on an accelerator, this waits for the device")

    def forbid():
        monkeypatch.setattr(torch.Tensor, "item", refuse)
        monkeypatch.setattr(torch.Tensor, "__float__", refuse)
        monkeypatch.setattr(torch.Tensor, "__bool__", refuse)

    return forbid


def test_steps_do_not_read_tensors(forbid_reading):
    optimizer = sgd_with_tensors()
    shared = torch.tensor(0.1)
    other = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=shared)
    assert other.param_groups[0]["lr"] is other.param_groups[1]["lr"]
    chain = [getattr(schedules, name)(optimizer, **ALL_LR[name]) for name in ALL_LR]
    chain += [StepLR(other, 2), ExponentialLR(other)]
    forbid_reading()
    for _ in range(20):
        for scheduler in chain:
            scheduler.step()
            scheduler.get_last_value()
            scheduler.state_dict()


def test_external_changes_to_tensor_or_group_take_effect():
    optimizer = sgd_with_tensors()
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    optimizer.param_groups[0]["lr"].fill_(8.0)
    optimizer.param_groups[1]["lr"] = 4.0
    scheduler.step()
    assert scheduler.get_last_value() == [4.0, 2.0]


def test_compiled_step_uses_a_new_rate_without_recompilation():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.5), foreach=False)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, backend=backend)
    weight.grad = torch.ones(2)
    for _ in range(4):
        step()
        scheduler.step()
    assert weight.tolist() == pytest.approx([1 - 0.5 - 0.25 - 0.125 - 0.0625] * 2)
    assert len(compiles) == 1


# ---- momentum -----------------------------------------------------------------------------------


def test_momentum_of_sgd_is_scheduled():
    optimizer = sgd(momentum=0.8)
    scheduler = ExponentialMomentum(optimizer, gamma=0.5)
    values = [v[0] for v in history(optimizer, [scheduler], 3, "momentum")]
    assert values == pytest.approx([0.8, 0.4, 0.2])


def test_momentum_of_adam_is_its_first_beta_and_schedulers_can_be_chained():
    optimizer = torch.optim.Adam([parameter()], betas=(0.8, 0.99))
    chain = [CosineAnnealingMomentum(optimizer, T_max=4, eta_min=0.4, end=4), StepMomentum(optimizer, 4, 0.5)]
    values = history(optimizer, chain, 5, "momentum")
    assert [v[0] for v in values[:3]] == pytest.approx([0.8, 0.6 + 0.2 * 0.5**0.5, 0.6])
    assert optimizer.param_groups[0]["betas"] == (optimizer.param_groups[0]["momentum"], 0.99)
    assert chain[-1].get_last_value() == [optimizer.param_groups[0]["momentum"]]


# ---- plateau ------------------------------------------------------------------------------------


def test_plateau_counts_validations_and_raises_an_error_for_a_missing_metric():
    optimizer = sgd()
    scheduler = ReduceOnPlateauLR(optimizer, monitor="val/loss", patience=0, begin=1, end=3)
    assert scheduler.need_val_args
    scheduler.step({"val/loss": torch.tensor(1.0)})  # epoch 0 is before `begin`
    assert scheduler.last_step == -1
    for _ in range(20):
        scheduler.step()  # an epoch without validation
    assert scheduler.get_last_value() == [0.1, 0.05]
    inside = ReduceOnPlateauLR(optimizer, monitor="val/loss")
    with pytest.raises(ConfigError, match="did you mean 'val/los'"):
        inside.step({"val/los": 1.0})
