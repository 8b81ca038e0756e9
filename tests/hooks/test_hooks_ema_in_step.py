"""A step that averages in itself, as a compiled graph does, makes the average that the hook would."""

import pytest
import torch
from ema_runs import SCHEDULED, History, StopAfter, StoppedError, assert_close, average_of, ema_run
from torch.utils.data import TensorDataset

from slipstream.hooks import Hook
from tiny_runs import Net, assert_same, loader, run, samples, weights


class AveragingStep:
    """Runs another step and averages after it, as a compiled graph does within."""

    def __init__(self, step):
        self.step = step
        self.adopted = None
        self.shares = []

    def adopt_average(self, averages, currents, share):
        self.adopted = averages, currents, share

    @torch.no_grad()
    def __call__(self, batch):
        with torch.enable_grad():
            logs = self.step(batch)
        if self.adopted is not None:
            averages, currents, share = self.adopted
            self.shares.append(share())
            weight = torch.tensor(self.shares[-1])
            torch._foreach_lerp_(averages, currents, [weight.item()] * len(averages))
        return logs


class TakeTheStep(Hook):
    priority = "VERY_HIGH"

    def before_train(self, runner):
        runner.step = self.step = AveragingStep(runner.step)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "hook",
    [
        dict(type="EMAHook", momentum=0.2),
        dict(type="EMAHook", momentum=0.2, begin_iter=4),
        dict(type="EMAHook", momentum=0.2, begin_epoch=2, update_buffers=True),
        dict(type="EMAHook", ema_type="MomentumAnnealingEMA", momentum=0.2, gamma=3),
        dict(type="EMAHook", ema_type="StochasticWeightAverage"),
        dict(SCHEDULED, decay=0.8, beta=3.0),
        dict(SCHEDULED, decay=0.8, beta=3.0, begin_iter=4),
    ],
)
def test_a_step_that_averages_makes_the_same_average(tmp_path, hook, accumulate):
    changes = dict(
        model=dict(type=Net, norm=True),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=accumulate),
    )
    plain, plain_history = ema_run(tmp_path / "a", **changes, custom_hooks=[hook, history := History()])
    plain_history = history
    taken, history = TakeTheStep(), History()
    runner, _ = ema_run(tmp_path / "b", **changes, custom_hooks=[hook, taken, history])
    averages, currents, _share = taken.step.adopted
    assert len(taken.step.shares) == 10
    assert all(one is other for one, other in zip(currents, runner.model.parameters(), strict=False))
    assert all(
        one is other for one, other in zip(averages, average_of(runner).module.parameters(), strict=False)
    )
    assert_same(weights(plain), weights(runner))
    assert_same(average_of(plain).state_dict(), average_of(runner).state_dict())
    for one, other in zip(plain_history.validated, history.validated, strict=True):
        assert_same(one, other)
    shares = [share for share in taken.step.shares if share]
    assert shares[0] == 1.0
    assert all(0 < share < 1 for share in shares[1:])
    begin = hook.get("begin_iter", 1) if not hook.get("begin_epoch") else 6
    every = accumulate if "ScheduledEMA" in hook.values() else 1
    due = [step for step in range(begin, 11) if step % every == 0 or step == 10]
    assert len(shares) == len(due)


def test_a_run_whose_step_averages_goes_on_bit_for_bit(tmp_path):
    hook = dict(SCHEDULED, decay=0.8, beta=3.0)
    changes = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)))
    whole = run(tmp_path / "a", **changes, custom_hooks=[hook, TakeTheStep()])
    with pytest.raises(StoppedError):
        run(tmp_path / "b", **changes, custom_hooks=[hook, TakeTheStep(), StopAfter(7)])
    parts = run(tmp_path / "b", **changes, custom_hooks=[hook, TakeTheStep()], resume=True)
    assert_same(average_of(whole).state_dict(), average_of(parts).state_dict())


def test_an_average_of_every_third_step_stays_the_hooks_own(tmp_path):
    hook, taken = dict(type="EMAHook", momentum=0.2, interval=3), TakeTheStep()
    plain, _ = ema_run(tmp_path / "a", custom_hooks=[hook])
    runner, _ = ema_run(tmp_path / "b", custom_hooks=[hook, taken])
    assert taken.step.adopted is None
    assert_same(average_of(plain).state_dict(), average_of(runner).state_dict())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("hook", [dict(type="EMAHook", momentum=0.2), dict(SCHEDULED, decay=0.8, beta=3.0)])
def test_the_compiled_step_averages_as_the_hook_does(tmp_path, hook, accumulate):
    torch._dynamo.reset()
    changes = dict(
        model=dict(type=Net, norm=True),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=accumulate),
    )
    found = []
    for name, cfg in (("a", {}), ("b", dict(compile=dict(scope="step", backend="aot_eager")))):
        history = History()
        runner, _ = ema_run(tmp_path / name, **changes, cfg=cfg, custom_hooks=[hook, history])
        found.append((average_of(runner).state_dict(), history.validated, weights(runner)))
    (eager, eager_validated, _), (own, validated, now) = found
    assert type(runner.step).__name__ == "GraphStep"
    assert_close(eager, own)
    for one, other in zip(eager_validated, validated, strict=True):
        assert_close(one, other)
    for name, value in now.items():
        if name in ("first.weight", "last.weight", "last.bias"):  # what BatchNorm takes off again never moves
            assert not torch.allclose(own[f"module.{name}"], value, atol=1e-4), f"{name} is the model's"


@pytest.mark.parametrize("scope", [None, "step"])
def test_an_average_never_takes_the_statistics_of_a_step_that_is_skipped(tmp_path, scope):
    """The guard puts buffers back after the step; in the average a NaN would stay for good."""
    torch._dynamo.reset()
    inputs, targets = samples()
    inputs[9, 0] = float("nan")
    runner = run(
        tmp_path,
        model=dict(type=Net, norm=True),
        cfg=dict(compile=dict(scope=scope, backend="aot_eager")) if scope else {},
        train_dataloader=loader(TensorDataset(inputs, targets), shuffle=False),
        custom_hooks=[dict(SCHEDULED, decay=0.8, beta=3.0), dict(type="NanGuardHook", action="skip")],
    )
    assert type(runner.step).__name__ == ("GraphStep" if scope else "EagerStep")
    guard = next(hook for hook in runner.hooks if type(hook).__name__ == "NanGuardHook")
    assert guard.skipped > 0
    average = average_of(runner)
    assert average.steps > guard.skipped
    assert all(value.isfinite().all() for value in average.state_dict().values())
    name = "norm.running_mean"
    assert not torch.equal(average.module.state_dict()[name], runner.model.state_dict()[name])
