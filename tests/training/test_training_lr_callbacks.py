"""User-defined learning rate schedules derived from `LRCallbackBase`: rates, arguments and errors."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.registry import PARAM_SCHEDULERS
from slipstream.training import Callback, Phase, Trainer
from slipstream.training.user_schedules import LRCallbackBase


class UserStep(LRCallbackBase):
    """Multiply the rates after the given epochs."""

    def __init__(self, user_lr_updates, user_lr_factors=(0.5, 0.1), **kwargs):
        super().__init__(Phase.TRAIN_EPOCH_END, **kwargs)
        self.updates, self.factors = user_lr_updates, user_lr_factors

    def is_lr_scheduling_enabled(self, context):
        return self.training_params.lr_warmup_epochs <= context.epoch

    def perform_scheduling(self, context):
        for name, rate in self.initial_lr.items():
            self.lr[name] = rate
            for update, factor in zip(self.updates, self.factors, strict=True):
                self.lr[name] *= factor if update <= context.epoch else 1
        self.update_lr(context.optimizer, context.epoch, None)


class PerBatch(LRCallbackBase):
    """Decrease the learning rate of all parameter groups linearly, after each batch."""

    def __init__(self, **kwargs):
        super().__init__(Phase.TRAIN_BATCH_END, **kwargs)

    def is_lr_scheduling_enabled(self, context):
        return True

    def perform_scheduling(self, context):
        done = context.epoch * self.train_loader_len + context.batch_idx + 1
        total = self.training_params.max_epochs * self.train_loader_len
        self.lr = self.initial_lr["default"] * (1 - done / total)
        self.update_lr(context.optimizer, context.epoch, context.batch_idx)


class Halve(LRCallbackBase):
    """Halve the current rates after each epoch."""

    def __init__(self, **kwargs):
        super().__init__(Phase.TRAIN_EPOCH_END, **kwargs)

    def is_lr_scheduling_enabled(self, context):
        return True

    def perform_scheduling(self, context):
        for name in self.lr:
            self.lr[name] /= 2
        self.update_lr(context.optimizer, context.epoch)


class Rates(Callback):
    """Record the rates of each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, context):
        found = [(group["params"][0].ndim, group["lr"]) for group in context.optimizer.param_groups]
        self.seen.append([rate for _, rate in sorted(found, reverse=True)])


def train(folder, **params):
    torch.manual_seed(0)
    inputs, labels = torch.randn(12, 3), torch.randint(2, (12,))
    rates = Rates()
    Trainer("run", str(folder)).train(
        nn.Linear(3, 2),
        dict(
            max_epochs=5, initial_lr=0.8, loss="CrossEntropyLoss", silent_mode=True, average_best_models=False,
            phase_callbacks=[rates], metric_to_watch=None,
        ) | params,
        DataLoader(TensorDataset(inputs, labels), batch_size=4),
    )  # fmt: skip
    return rates.seen


def test_a_registered_schedule_receives_its_keys(tmp_path):
    PARAM_SCHEDULERS.register_module(name="user_step_of_the_test", module=UserStep)
    seen = train(
        tmp_path, lr_mode="user_step_of_the_test", user_lr_updates=[1, 3], user_lr_factors=[0.5, 0.1]
    )
    # The schedule runs at the end of each epoch, so a new rate applies from the next epoch.
    assert [rates[0] for rates in seen] == pytest.approx(
        [rate for rate in (0.8, 0.8, 0.4, 0.4, 0.04) for _ in range(3)]
    )


def test_the_warmup_precedes_the_schedule(tmp_path):
    seen = train(tmp_path, lr_mode=UserStep, user_lr_updates=[0, 3], lr_warmup_epochs=2)
    wanted = [0.8 / 3, 0.8 * 2 / 3, 0.8, 0.4, 0.04]
    assert [rates[0] for rates in seen[::3]] == pytest.approx(wanted)


def test_rates_by_prefix_are_scheduled_separately(tmp_path):
    seen = train(tmp_path, lr_mode=UserStep, user_lr_updates=[0, 2], initial_lr={"bias": 0.2, "default": 0.6})
    weight, bias = zip(*seen[::3], strict=True)
    assert weight == pytest.approx([0.6, 0.3, 0.3, 0.03, 0.03])
    assert bias == pytest.approx([0.2, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("speed", [None, {"compile": {"scope": "step", "backend": "aot_eager"}}])
def test_a_schedule_can_change_the_rate_after_each_batch(tmp_path, speed):
    seen = train(tmp_path, lr_mode=PerBatch, max_epochs=3, speed=speed)
    assert [rates[0] for rates in seen] == pytest.approx([0.8 * (1 - step / 9) for step in range(9)])


def test_a_resumed_run_continues_from_the_current_rates(tmp_path):
    train(tmp_path, lr_mode=Halve, max_epochs=2)
    seen = train(tmp_path, lr_mode=Halve, max_epochs=4, resume=True)
    assert [rates[0] for rates in seen] == pytest.approx([0.2] * 3 + [0.1] * 3)
