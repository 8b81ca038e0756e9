"""The average is the same whether the eager step, the compiled step or the hook after the step updates it."""

import pytest
import torch
from ema_runs import SCHEDULED, History, StopAfter, StoppedError, assert_close, average_of, ema_run
from torch.utils.data import TensorDataset

from slipstream.hooks import Hook
from slipstream.model import AveragePart
from tiny_runs import Net, assert_same, loader, run, samples, weights


class OtherStep:
    """A step that leaves updating the average to the hook, like the step of a model that overrides `train_step`."""

    def __init__(self, step):
        self.step = step

    def __call__(self, batch):
        return self.step(batch)


class UseOtherStep(Hook):
    priority = "VERY_HIGH"

    def before_train(self, runner):
        runner.step = OtherStep(runner.step)


def averages_in_step(runner):
    return any(isinstance(part, AveragePart) for part in runner.optim_wrapper.parts)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "hook",
    [
        dict(type="EMAHook", momentum=0.2, begin_epoch=2, update_buffers=True),
        dict(type="EMAHook", ema_type="MomentumAnnealingEMA", momentum=0.2, gamma=3),
        dict(type="EMAHook", ema_type="StochasticWeightAverage"),
        dict(SCHEDULED, decay=0.8, beta=3.0, begin_iter=4),
    ],
)
def test_average_in_the_step_matches_average_in_the_hook(tmp_path, hook, accumulate):
    changes = dict(
        model=dict(type=Net, norm=True),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=accumulate),
    )
    plain_history, taken, history = History(), UseOtherStep(), History()
    plain, _ = ema_run(tmp_path / "a", **changes, custom_hooks=[hook, plain_history])
    runner, _ = ema_run(tmp_path / "b", **changes, custom_hooks=[hook, taken, history])
    assert averages_in_step(plain)
    assert not averages_in_step(runner)
    assert_same(weights(plain), weights(runner))
    assert_same(average_of(plain).state_dict(), average_of(runner).state_dict())
    for one, other in zip(plain_history.validated, history.validated, strict=True):
        assert_same(one, other)
    begin = hook.get("begin_iter", 1) if not hook.get("begin_epoch") else 6
    every = accumulate if "ScheduledEMA" in hook.values() else 1
    due = [step for step in range(begin, 11) if step % every == 0 or step == 10]
    assert average_of(plain).steps == len(due)


@pytest.mark.parametrize("hooks", [[], [UseOtherStep]])
def test_resumed_run_with_an_average_is_bitwise_identical(tmp_path, hooks):
    def options():
        return [dict(SCHEDULED, decay=0.8, beta=3.0), *(hook() for hook in hooks)]

    changes = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)))
    whole = run(tmp_path / "a", **changes, custom_hooks=options())
    with pytest.raises(StoppedError):
        run(tmp_path / "b", **changes, custom_hooks=[*options(), StopAfter(7)])
    parts = run(tmp_path / "b", **changes, custom_hooks=options(), resume=True)
    assert_same(average_of(whole).state_dict(), average_of(parts).state_dict())


@pytest.mark.parametrize(
    ("hook", "accumulate"),
    [(dict(type="EMAHook", momentum=0.2), 1), (dict(SCHEDULED, decay=0.8, beta=3.0), 3)],
)
def test_compiled_step_and_hook_have_the_same_average(tmp_path, hook, accumulate):
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
        if name in (
            "first.weight",
            "last.weight",
            "last.bias",
        ):  # not first.bias, whose gradient is zero before BatchNorm
            assert not torch.allclose(own[f"module.{name}"], value, atol=1e-4), (
                f"{name} equals the model's weight"
            )


@pytest.mark.parametrize("scope", [None, "step"])
def test_average_ignores_batch_norm_statistics_of_skipped_steps(tmp_path, scope):
    """The guard restores the buffers after the step, but a NaN in the average would be permanent."""
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
