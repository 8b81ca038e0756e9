"""Test that a Runner matches a plain training loop, and does not synchronize with the device in unlogged steps."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from slipstream.hooks import Hook
from slipstream.logging import MessageHub
from slipstream.model import BaseModel
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.runner import Runner
from tiny_runs import Losses, Net, assert_same, loader, run, samples, scalars, training, validation, weights

INPUTS, TARGETS = samples()


def batches(epochs, size=8, seed=3):
    """Yield batches in the documented order: in each epoch, a permutation drawn with seed + epoch."""
    for epoch in range(epochs):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed + epoch))
        for part in order.split(size):
            yield INPUTS[part], TARGETS[part]


def by_hand(model, optimizer, counts=1, max_norm=None, dtype=None, epochs=2):
    """Train with a plain loop, and return the loss of each step."""
    done, total = [], epochs * 5
    for step, (inputs, targets) in enumerate(batches(epochs), 1):
        window = total % counts if step > total - total % counts else counts
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(inputs, targets, "tensor"), targets)
        (loss / window if window > 1 else loss).backward()
        done.append(loss.item())
        if step % counts == 0 or step == total:
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return done


def fresh(**options):
    torch.manual_seed(11)
    return Net(**options)


@pytest.mark.parametrize("wrapper", ["OptimWrapper", "AmpOptimWrapper"])
@pytest.mark.parametrize(("counts", "max_norm"), [(1, None), (1, 0.3), (2, 0.3), (4, 0.3)])
def test_runner_is_bitwise_identical_to_a_plain_loop(tmp_path, counts, max_norm, wrapper):
    model, twin = fresh(norm=True), fresh(norm=True)
    dtype = torch.bfloat16 if wrapper == "AmpOptimWrapper" else None
    expected = by_hand(twin, torch.optim.SGD(twin.parameters(), 0.1, 0.9), counts, max_norm, dtype)
    losses = Losses()
    run(
        tmp_path,
        model=model,
        optim_wrapper=dict(
            type=wrapper,
            optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
            accumulative_counts=counts,
            clip_grad=dict(max_norm=max_norm) if max_norm else None,
        ),
        custom_hooks=[losses],
    )
    assert [loss.item() for loss in losses.by_iter.values()] == expected
    assert_same(model.state_dict(), twin.state_dict())


def test_dropout_is_determined_by_the_seed(tmp_path):
    losses = Losses()
    run(tmp_path, model=dict(type=Net, dropout=0.5), custom_hooks=[losses])
    torch.manual_seed(3)
    twin = Net(dropout=0.5)
    expected = by_hand(twin, torch.optim.SGD(twin.parameters(), 0.1))
    assert [loss.item() for loss in losses.by_iter.values()] == expected


def test_logged_losses_are_means_of_the_step_losses(tmp_path):
    twin = fresh()
    expected = by_hand(twin, torch.optim.SGD(twin.parameters(), 0.1))
    runner = run(
        tmp_path,
        model=fresh(),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=2)),
        log_processor=dict(window_size=2),
    )
    lines = [line for line in scalars(runner) if "loss" in line]
    # Every second step and the last step of each epoch are logged.
    assert [line["iter"] for line in lines] == [2, 4, 5, 7, 9, 10]
    for line in lines:
        assert line["loss"] == pytest.approx(np.mean(expected[line["iter"] - 2 : line["iter"]]), rel=1e-6)


def lrs(runner):
    return {line["iter"]: line["lr"] for line in scalars(runner) if "lr" in line}


def test_warm_up_by_iteration_and_decay_by_epoch_set_the_learning_rates(tmp_path):
    runner = run(
        tmp_path,
        train_cfg=dict(by_epoch=True, max_epochs=4),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=6),
            dict(type="MultiStepLR", milestones=[2, 3], gamma=0.1, by_epoch=True),
        ],
    )
    for step, lr in lrs(runner).items():
        warm = 0.1 + 0.9 * min(step - 1, 5) / 5
        decay = 0.1 ** sum((step - 1) // 5 >= milestone for milestone in (2, 3))
        assert lr == pytest.approx(0.1 * warm * decay), step


def test_schedulers_end_at_the_end_of_training_by_default(tmp_path):
    runner = run(
        tmp_path,
        train_cfg=dict(by_epoch=False, max_iters=8),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False),
    )
    assert list(lrs(runner).values()) == pytest.approx(COSINE)


COSINE = [0.05 * (1 + np.cos(np.pi * step / 8)) for step in range(8)]
LINEAR = [0.1 * (1 + 2 * step / 7) / 3 for step in range(8)]
CONVERTED = {
    "CosineAnnealingLR": ({}, COSINE),
    "PolyLR": ({}, [0.1 * (1 - step / 7) for step in range(8)]),
    "LinearLR": ({}, LINEAR),
    "ExponentialLR": (dict(gamma=0.5), [0.1 * 0.5**step for step in range(8)]),
    "StepLR": (dict(step_size=1), [0.1] * 5 + [0.01] * 3),
}


@pytest.mark.parametrize("sampler", ["DefaultSampler", "InfiniteSampler"])
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_schedules_end_with_an_iteration_based_run_in_the_middle_of_a_pass(tmp_path, name, sampler):
    options, expected = CONVERTED[name]
    runner = run(
        tmp_path,
        train_dataloader=loader(sampler=sampler),
        train_cfg=dict(by_epoch=False, max_iters=8),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        param_scheduler=dict(type=name, by_epoch=True, convert_to_iter_based=True, **options),
    )
    assert list(lrs(runner).values()) == pytest.approx(expected)


class Gan(BaseModel):
    """Two networks trained alternately, as in MMEngine's GAN tutorial."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(4, 4)
        self.critic = nn.Linear(4, 1)

    def forward(self, inputs, targets=None, mode="tensor"):
        return self.generator(inputs)

    def train_step(self, data, optim_wrapper):
        inputs, _ = self.data_preprocessor(data, True)
        made = self.generator(inputs)
        critic = (self.critic(made.detach()) - self.critic(inputs)).mean()
        optim_wrapper["critic"].update_params(critic)
        generator = -self.critic(made).mean() + (made - inputs).square().mean()
        optim_wrapper["generator"].update_params(generator)
        return {"loss_critic": critic, "loss_generator": generator}


def gan_training(work_dir, model, **changes):
    optim = {
        name: OptimWrapper(torch.optim.SGD(getattr(model, name).parameters(), lr=0.1))
        for name in ("generator", "critic")
    }
    return training(work_dir, **{"model": model, "optim_wrapper": optim, **changes})


def test_each_optimizer_has_its_own_scheduler(tmp_path):
    torch.manual_seed(11)
    model = Gan()
    twin = copy.deepcopy(model)
    optimizers = {
        name: torch.optim.SGD(getattr(model, name).parameters(), lr=lr)
        for name, lr in dict(generator=0.1, critic=0.01).items()
    }
    runner = Runner(
        **training(
            tmp_path,
            model=model,
            optim_wrapper={name: OptimWrapper(optimizer) for name, optimizer in optimizers.items()},
            param_scheduler=dict(generator=dict(type="StepLR", step_size=1, gamma=0.5)),
            default_hooks=dict(logger=dict(type="LoggerHook", interval=5)),
        )
    )
    runner.train()
    assert isinstance(runner.optim_wrapper, OptimWrapperDict)
    for step, (inputs, _) in enumerate(batches(2)):
        made = twin.generator(inputs)
        (twin.critic(made.detach()) - twin.critic(inputs)).mean().backward()
        with torch.no_grad():
            for p in twin.critic.parameters():
                p -= 0.01 * p.grad
                p.grad = None
        (-twin.critic(made).mean() + (made - inputs).square().mean()).backward()
        with torch.no_grad():
            for p in twin.generator.parameters():
                p -= (0.1 if step < 5 else 0.05) * p.grad
                p.grad = None
    for name, value in model.state_dict().items():
        if name.startswith("generator"):
            torch.testing.assert_close(value, twin.state_dict()[name])
    shown = scalars(runner)[-1]
    assert shown["generator.lr"] == pytest.approx(0.05)
    assert shown["critic.lr"] == pytest.approx(0.01)
    assert torch.isfinite(torch.tensor(shown["loss_generator"]))
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    assert saved["optimizer"].keys() == saved["param_schedulers"].keys() == {"generator", "critic"}
    resumed = Runner(
        **training(
            tmp_path,
            model=Gan(),
            optim_wrapper={name: OptimWrapper(optimizer) for name, optimizer in optimizers.items()},
            param_scheduler=dict(generator=dict(type="StepLR", step_size=1, gamma=0.5)),
            resume=True,
        )
    )
    resumed.train()
    assert_same(weights(runner), weights(resumed))


def test_train_step_reads_the_iteration(tmp_path):
    seen = []

    class Reads(Net):
        def train_step(self, data, optim_wrapper):
            seen.append(MessageHub.get_current_instance().get_info("iter"))
            return super().train_step(data, optim_wrapper)

    run(tmp_path, model=Reads())
    assert seen == [*range(10)]


class Profile(Hook):
    """A hook that profiles the steps from `begin` to `end`, excluding `end`."""

    priority = "HIGHEST"

    def __init__(self, begin, end):
        self.begin, self.end = begin, end
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.begin:
            self.profiler.start()
        if runner.iter == self.end:
            self.profiler.stop()


@pytest.mark.parametrize("loop", [dict(by_epoch=False, max_iters=130), dict(by_epoch=True, max_epochs=1)])
def test_steps_between_log_intervals_do_not_synchronize(tmp_path, loop):
    profile = Profile(12, 112)
    run(
        tmp_path,
        model=dict(type=Net, dropout=0.1, norm=True),
        train_dataloader=loader(TensorDataset(*samples(8 * 130))),
        train_cfg=loop,
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            dtype="bfloat16",
            optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, end=120, by_epoch=False),
            dict(type="LinearMomentum", start_factor=0.5, end=120, by_epoch=False),
        ],
        custom_hooks=[dict(type="EMAHook"), profile],
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1000), checkpoint=None),
    )
    counts = {event.key: event.count for event in profile.profiler.key_averages()}
    assert counts["aten::addmm"] >= 200  # check that the profiler recorded the steps
    waits = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
    assert {name: counts[name] for name in waits if name in counts} == {}


def test_validation_does_not_change_training(tmp_path):
    model = dict(type=Net, norm=True)
    without = run(tmp_path / "a", model=model)
    assert_same(weights(without), weights(run(tmp_path / "b", model=model, **validation())))
