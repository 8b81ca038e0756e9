"""Test that the schedulers match torch's schedulers and closed-form expressions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as theirs

from slipstream.optim import scheduler as ours

lrs = st.floats(1e-4, 10)
factors = st.floats(0.01, 1)
lengths = st.integers(2, 60)
STEPS = 200


def make_sgd(*lr_values):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lr_values]
    return torch.optim.SGD(groups, lr=0.1)


def run(make, lr_values, steps=STEPS):
    optimizer = make_sgd(*lr_values)
    scheduler = make(optimizer)
    history = []
    optimizer.step()  # avoid torch's warning about the call order
    for _ in range(steps):
        history.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step()
    return history


def assert_same(make_ours, make_theirs, lr, steps=STEPS):
    lr_values = [lr, lr / 3]
    for mine, yours in zip(run(make_ours, lr_values, steps), run(make_theirs, lr_values, steps), strict=True):
        assert mine == pytest.approx(yours, rel=1e-12, abs=1e-12)


few = settings(max_examples=25, deadline=None)


@few
@given(lr=lrs, factor=factors, length=lengths)
def test_constant_lr_matches_torch(lr, factor, length):
    assert_same(
        lambda o: ours.ConstantLR(o, factor=factor, end=length + 1),
        lambda o: theirs.ConstantLR(o, factor=factor, total_iters=length),
        lr,
    )


@few
@given(lr=lrs, start=factors, stop=factors, length=lengths)
def test_linear_lr_matches_torch(lr, start, stop, length):
    assert_same(
        lambda o: ours.LinearLR(o, start_factor=start, end_factor=stop, end=length + 1),
        lambda o: theirs.LinearLR(o, start_factor=start, end_factor=stop, total_iters=length),
        lr,
    )


@few
@given(lr=lrs, gamma=st.floats(0.9, 1.01))
def test_exponential_lr_matches_torch(lr, gamma):
    assert_same(
        lambda o: ours.ExponentialLR(o, gamma=gamma), lambda o: theirs.ExponentialLR(o, gamma=gamma), lr
    )


@few
@given(lr=lrs, gamma=factors, size=lengths)
def test_step_lr_matches_torch(lr, gamma, size):
    assert_same(lambda o: ours.StepLR(o, size, gamma), lambda o: theirs.StepLR(o, size, gamma), lr)


@few
@given(lr=lrs, gamma=factors, milestones=st.lists(st.integers(1, STEPS), min_size=1, max_size=5))
def test_multi_step_lr_with_repeated_milestones_matches_torch(lr, gamma, milestones):
    assert_same(
        lambda o: ours.MultiStepLR(o, milestones, gamma),
        lambda o: theirs.MultiStepLR(o, sorted(milestones), gamma),
        lr,
    )


@few
@given(lr=lrs, power=st.floats(0.5, 3), length=lengths)
def test_poly_lr_matches_torch(lr, power, length):
    assert_same(
        lambda o: ours.PolyLR(o, power=power, end=length + 1),
        lambda o: theirs.PolynomialLR(o, power=power, total_iters=length),
        lr,
    )


@few
@given(lr=lrs, eta_min=st.floats(0, 1e-4), period=lengths)
def test_cosine_annealing_lr_matches_torch_over_several_periods(lr, eta_min, period):
    assert_same(
        lambda o: ours.CosineAnnealingLR(o, T_max=period, eta_min=eta_min),
        lambda o: theirs.CosineAnnealingLR(o, T_max=period, eta_min=eta_min),
        lr,
    )


@few
@given(lr=lrs, period=lengths)
def test_cosine_restart_lr_matches_torch_within_its_periods(lr, period):
    count = STEPS // period + 1
    assert_same(
        lambda o: ours.CosineRestartLR(o, [period] * count, [1] * count),
        lambda o: theirs.CosineAnnealingWarmRestarts(o, T_0=period),
        lr,
    )


@few
@given(
    peak=lrs,
    total=st.integers(10, STEPS),
    fraction=st.floats(0.15, 0.45),
    strategy=st.sampled_from(["cos", "linear"]),
    three_phase=st.booleans(),
)
def test_one_cycle_lr_matches_torch(peak, total, fraction, strategy, three_phase):
    options = {
        "pct_start": fraction,
        "anneal_strategy": strategy,
        "three_phase": three_phase,
        "div_factor": 7.0,
    }
    assert_same(
        lambda o: ours.OneCycleLR(o, eta_max=peak, total_steps=total, **options),
        lambda o: theirs.OneCycleLR(o, max_lr=peak, total_steps=total, cycle_momentum=False, **options),
        peak,
        total - 1,
    )


@few
@given(
    metrics=st.lists(st.floats(-5, 5, allow_nan=False), min_size=20, max_size=40),
    rule=st.sampled_from([("less", "min"), ("greater", "max")]),
    threshold_rule=st.sampled_from(["rel", "abs"]),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
)
def test_reduce_on_plateau_lr_matches_torch(metrics, rule, threshold_rule, patience, cooldown):
    first, second = make_sgd(1.0, 0.3), make_sgd(1.0, 0.3)
    common = {"factor": 0.5, "patience": patience, "threshold": 0.1, "cooldown": cooldown}
    mine = ours.ReduceOnPlateauLR(
        first, monitor="m", rule=rule[0], threshold_rule=threshold_rule, min_value=[0.1, 0.2], **common
    )
    yours = theirs.ReduceLROnPlateau(
        second, mode=rule[1], threshold_mode=threshold_rule, min_lr=[0.1, 0.2], **common
    )
    for metric in metrics:
        mine.step()
        mine.step({"m": metric})
        yours.step(metric)
        assert mine.get_last_value() == pytest.approx(
            [group["lr"] for group in second.param_groups], rel=1e-12
        )


@few
@given(lr=lrs, period=st.integers(2, 300), ratio=st.floats(0, 0.5))
def test_cosine_annealing_matches_its_closed_form(lr, period, ratio):
    history = run(lambda o: ours.CosineAnnealingLR(o, T_max=period, eta_min_ratio=ratio), [lr], 3 * period)
    for t, (value,) in enumerate(history):
        expected = lr * ratio + lr * (1 - ratio) * (1 + math.cos(math.pi * t / period)) / 2
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-10)


@few
@given(lr=lrs, warm_up=st.integers(2, 30), rest=st.integers(2, 100), start=factors)
def test_warm_up_followed_by_cosine_reaches_the_full_rate_and_then_zero(lr, warm_up, rest, start):
    optimizer = make_sgd(lr)
    end = warm_up + rest
    chain = [
        ours.LinearLR(optimizer, start_factor=start, end=warm_up, by_epoch=False),
        ours.CosineAnnealingLR(optimizer, begin=warm_up, end=end, by_epoch=False),
    ]
    for step in range(end + 1):
        if step < warm_up:
            expected = lr * (start + (1 - start) * step / (warm_up - 1))
        else:  # the last update, at step `end - 1`, is one step before T_max
            expected = lr * (1 + math.cos(math.pi * min(step - warm_up, rest - 1) / rest)) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        for scheduler in chain:
            scheduler.step()


def test_combined_schedulers_multiply_their_factors():
    optimizer = make_sgd(1.0)
    both = [ours.ExponentialLR(optimizer, gamma=0.9), ours.StepLR(optimizer, step_size=3, gamma=0.5)]
    for step in range(30):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9**step * 0.5 ** (step // 3), rel=1e-12)
        for scheduler in both:
            scheduler.step()
