"""Runs with averaged weights, and reference averages in double precision."""

import torch

from slipstream.hooks import EMAHook, Hook
from slipstream.runner import Runner
from tiny_runs import Accuracy, Net, training, validation, weights

SCHEDULED = dict(type="EMAHook", ema_type="ScheduledEMA")


class History(Hook):
    """A hook that stores the weights after each step and those used in validation or test."""

    priority = "VERY_LOW"

    def __init__(self):
        self.steps, self.validated = [], []

    def before_train(self, runner):
        self.start = weights(runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps.append(weights(runner))

    def _before_iter(self, runner, batch_idx, data_batch=None, mode="train"):
        if mode != "train" and batch_idx == 0:
            self.validated.append(weights(runner))


def average(steps, momentum):
    """Return the reference EMA, which is computed in double precision."""
    mean = {name: value.double() for name, value in steps[0].items()}
    for step in steps[1:]:
        mean = {name: (1 - momentum) * mean[name] + momentum * step[name].double() for name in mean}
    return {name: value.float() for name, value in mean.items()}


def scheduled(steps, decay_of):
    """Return the reference EMA with the decay `decay_of(s, total)` at update s. The first update copies the weights."""
    mean = {name: value.double() for name, value in steps[0].items()}
    for number, step in enumerate(steps[1:], start=2):
        decay = decay_of(number, len(steps))
        mean = {
            name: decay * mean[name] + (1 - decay) * value.double() if value.is_floating_point() else value
            for name, value in step.items()
        }
    return {name: value.to(steps[0][name].dtype) for name, value in mean.items()}


def assert_close(one, other):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], msg=name)


def ema_run(folder, *hooks, **changes):
    history = History()
    changes.setdefault("custom_hooks", [dict(type="EMAHook", momentum=0.2), history, *hooks])
    evaluation = validation()
    runner = Runner(
        **training(
            folder,
            **{"model": dict(type=Net), **changes},
            **evaluation,
            test_dataloader=evaluation["val_dataloader"],
            test_cfg=dict(),
            test_evaluator=dict(type=Accuracy),
        )
    )
    runner.train()
    return runner, history


def average_of(runner):
    return next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model


class StoppedError(Exception):
    pass


class StopAfter(Hook):
    priority = "LOWEST"

    def __init__(self, step):
        self.step = step

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.step:
            raise StoppedError
