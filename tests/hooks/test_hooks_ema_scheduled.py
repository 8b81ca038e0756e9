"""Tests of the formulas and update counts of averages, mainly ScheduledEMA, and of runs that are too short for them."""

import itertools
import math

import pytest
import torch
from ema_runs import (
    SCHEDULED,
    History,
    StopAfter,
    StoppedError,
    assert_close,
    average_of,
    ema_run,
    scheduled,
)

from slipstream.registry import MODELS
from tiny_runs import Net, assert_same, run, validation, weights


def threshold(s, total):
    return min(0.6, (1 + s) / (10 + s))


DECAYS = [
    (dict(decay=0.7, decay_type="constant"), lambda s, total: 0.7),
    (dict(decay=0.6, decay_type="threshold"), threshold),
    (dict(decay=0.8, decay_type="exp", beta=3.0), lambda s, total: 0.8 * (1 - math.exp(-3 * s / total))),
    (dict(decay=0.8), lambda s, total: 0.8 * (1 - math.exp(-15 * s / total))),
]


@pytest.mark.parametrize(("options", "decay_of"), DECAYS)
def test_every_decay_type_follows_its_formula(tmp_path, options, decay_of):
    hook, history = {**SCHEDULED, **options}, History()
    _runner, _ = ema_run(tmp_path, model=dict(type=Net, norm=True), custom_hooks=[hook, history])
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)["state_dict"]
    wanted = scheduled(history.steps, decay_of)
    assert_close(wanted, saved)
    assert_close(wanted, history.validated[1])
    for name in ("first.weight", "last.bias", "norm.running_mean", "norm.running_var"):
        assert not torch.allclose(saved[name], history.steps[-1][name], atol=1e-4), (
            f"{name} equals the model's weight"
        )
        assert not torch.allclose(saved[name], history.start[name], atol=1e-4), f"{name} has not changed"


def test_scheduled_average_is_updated_per_optimizer_step(tmp_path):
    history = History()
    hook = dict(SCHEDULED, decay=0.8, beta=3.0)
    optim = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=3)
    runner, _ = ema_run(tmp_path, custom_hooks=[hook, history], optim_wrapper=optim)
    moved = [
        history.steps[index] for index in (2, 5, 8, 9)
    ]  # with ten batches, the last accumulation window has only one batch
    assert_close(
        scheduled(moved, lambda s, total: 0.8 * (1 - math.exp(-3 * s / total))),
        history.validated[1],
    )
    assert average_of(runner).steps == 4


def test_counting_batches_starts_at_begin_iter(tmp_path):
    history = History()
    hook = dict(SCHEDULED, decay=0.8, beta=3.0, count="batches", begin_iter=5)
    optim = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=3)
    ema_run(tmp_path, custom_hooks=[hook, history], optim_wrapper=optim)
    moved, batches = [history.steps[index] for index in (5, 8, 9)], [2, 5, 6]  # batches 6, 9 and 10 of 10
    decay_of = lambda s, total: 0.8 * (1 - math.exp(-3 * batches[s - 1] / 6))  # noqa: E731
    assert_close(scheduled(moved, decay_of), history.validated[1])


def test_step_skipped_on_overflow_counts_as_an_update(tmp_path):
    scaled = dict(
        type="AmpOptimWrapper",
        dtype="float16",
        loss_scale=dict(init_scale=2.0**40),
        optimizer=dict(type="SGD", lr=0.1),
    )
    history = History()
    hook = dict(SCHEDULED, decay=0.7, decay_type="constant")
    runner, _ = ema_run(
        tmp_path,
        custom_hooks=[hook, history],
        optim_wrapper=scaled,
        train_cfg=dict(by_epoch=True, max_epochs=6),
    )
    starts = [history.start, *history.steps]
    skipped = [all(torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(starts)]
    assert skipped[0], "the scale 2**40 did not overflow float16"
    assert not all(skipped)
    assert average_of(runner).steps == 30
    assert_close(scheduled(history.steps, lambda s, total: 0.7), history.validated[-1])


@pytest.mark.parametrize(("stop", "accumulate"), [(3, 1), (5, 3), (7, 3)])
@pytest.mark.parametrize("options", [DECAYS[1][0], DECAYS[2][0]])
def test_run_resumed_within_an_epoch_restores_the_average_exactly(tmp_path, options, stop, accumulate):
    changes = dict(
        model=dict(type=Net, norm=True, dropout=0.2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=accumulate),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
    )
    hook = {**SCHEDULED, **options}
    whole = run(tmp_path / "a", **changes, **validation(), custom_hooks=[hook])
    with pytest.raises(StoppedError):
        run(tmp_path / "b", **changes, **validation(), custom_hooks=[hook, StopAfter(stop)])
    parts = run(tmp_path / "b", **changes, **validation(), custom_hooks=[hook], resume=True)
    assert_same(weights(whole), weights(parts))
    assert_same(average_of(whole).state_dict(), average_of(parts).state_dict())


# ---- runs that are too short for the average ------------------------------------------------------


@pytest.mark.parametrize(
    "average",
    [
        dict(type="ExponentialMovingAverage", momentum=0.02),
        dict(type="ExponentialMovingAverage", momentum=0.3, interval=3),
        dict(type="MomentumAnnealingEMA", momentum=0.01, gamma=9),
        dict(type="ScheduledEMA", decay=0.9, beta=2.0),
        dict(type="ScheduledEMA", decay=0.99, decay_type="threshold"),
        dict(type="StochasticWeightAverage"),
    ],
)
@pytest.mark.parametrize("total", [1, 40, 190])
def test_mean_update_matches_the_average_of_update_numbers(average, total):
    number = torch.nn.Linear(1, 1, bias=False)
    model = MODELS.build(average, default_args={"model": number})
    model.total_steps = total
    found = model.mean_update(total)
    for step in range(1, total + 1):
        torch.nn.init.constant_(number.weight, step)
        model.update_parameters(number)
    exact = model.module.weight.item()
    assert found == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (dict(decay=0.99, decay_type="constant"), True),
        (dict(decay=0.99, decay_type="threshold"), False),
        (dict(decay=0.5, decay_type="constant"), False),
    ],
)
def test_slow_average_logs_a_warning_at_the_start(tmp_path, options, warned):
    ema_run(tmp_path, custom_hooks=[{**SCHEDULED, **options}], log_level="WARNING")
    (log,) = tmp_path.rglob("*.log")
    assert ("EMAHook: the EMA decay is too high for" in log.read_text(encoding="utf-8")) == warned


def test_warnings_name_the_option_that_the_user_has_set(tmp_path):
    run(tmp_path, speed=dict(ema=dict(decay=0.9999, type="constant")), log_level="WARNING")
    (log,) = tmp_path.rglob("*.log")
    text = log.read_text(encoding="utf-8")
    assert "speed.ema: the EMA decay is too high for" in text
    assert "EMAHook" not in text
    assert "momentum" not in text
