"""Test that torch's scheduler objects in a Runner match plain loops that call `step` as torch documents."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler, swa_utils

from slipstream import Runner
from slipstream.errors import CheckpointError, ConfigError
from slipstream.hooks import Hook
from tiny_runs import Net, assert_same, loader, samples, training

STEPS = 15  # three epochs of five batches


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 3)


def inverse(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def parts(make):
    torch.manual_seed(5)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, make(optimizer)


def data():
    inputs, targets = samples()
    return torch.utils.data.TensorDataset(inputs.double(), targets)


def by_hand(make, by_epoch):
    """Return the weights after training with a plain loop."""
    net, optimizer, schedule = parts(make)
    inputs, targets = data().tensors
    for _ in range(3):
        for start in range(0, 40, 8):
            scores = net(inputs[start : start + 8], targets[start : start + 8], "tensor")
            optimizer.zero_grad()
            F.cross_entropy(scores, targets[start : start + 8]).backward()
            optimizer.step()
            if not by_epoch:
                schedule.step()
        if by_epoch:
            schedule.step()
    return net.state_dict()


def arguments(work_dir, make, option=None, **changes):
    net, optimizer, schedule = parts(make)
    return training(
        work_dir,
        model=net,
        train_dataloader=loader(data(), shuffle=False),
        optim_wrapper=optimizer,
        param_scheduler=schedule if option is None else dict(scheduler=schedule, by_epoch=option),
        **{"train_cfg": dict(by_epoch=True, max_epochs=3), **changes},
    )


@pytest.mark.parametrize(
    ("make", "option", "by_epoch"),
    [
        (one_cycle, None, False),
        (cosine, None, True),
        (inverse, False, False),
        (inverse, True, True),
    ],
)
@pytest.mark.parametrize("speed", [{}, {"compile": {"backend": "eager"}}], ids=["eager", "compiled"])
def test_schedulers_step_as_in_a_plain_loop(tmp_path, make, option, by_epoch, speed):
    runner = Runner(**arguments(tmp_path, make, option, speed=speed))
    runner.train()
    expected = by_hand(make, by_epoch)
    for name, value in runner.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


class Stop(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 7:
            raise KeyboardInterrupt


def test_run_with_one_cycle_can_be_resumed(tmp_path):
    every = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=7))
    whole = Runner(**arguments(tmp_path / "whole", one_cycle))
    whole.train()
    first = arguments(tmp_path / "part", one_cycle, default_hooks=every)
    stopped = Runner(**first, custom_hooks=[dict(type=Stop, priority="LOWEST")])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    second = Runner(**arguments(tmp_path / "part", one_cycle, default_hooks=every, resume=True))
    second.train()
    assert_same(second.model.state_dict(), whole.model.state_dict())


def resumed_with(tmp_path, first, second, option=None):
    """Train two epochs with one schedule, then resume with another and one more epoch; return the captured warnings."""
    by_epoch = dict(by_epoch=True, max_epochs=2)
    Runner(**arguments(tmp_path, first, option, train_cfg=by_epoch)).train()
    more = arguments(
        tmp_path, second, option, train_cfg=dict(by_epoch, max_epochs=3), resume=True, log_level="WARNING"
    )
    Runner(**more).train()


def test_changed_length_of_a_resumed_one_cycle_is_rejected(tmp_path):
    def cycle(steps):
        return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)

    with pytest.raises(
        CheckpointError, match=r"created with total_steps=15 \(before: 10\), but torch restores"
    ):
        resumed_with(tmp_path, cycle(10), cycle(15))


def test_changed_arguments_of_a_resumed_torch_scheduler_are_reported(tmp_path, capsys):
    resumed_with(
        tmp_path,
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 2),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    )
    text = capsys.readouterr().out
    assert "CosineAnnealingLR was created with other arguments" in text
    assert "torch restores the old schedule: T_max=3 (before: 2). To use" in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o, n: lr_scheduler.MultiStepLR(o, [n]), "MultiStepLR was created with other"),
        (
            lambda o, n: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, total_iters=1), lr_scheduler.CosineAnnealingLR(o, n)], [1]
            ),
            "CosineAnnealingLR was created with other arguments",
        ),
        (
            lambda o, n: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, total_iters=1), lr_scheduler.CosineAnnealingLR(o, 4)], [n]
            ),
            "milestones=[3] (before: [2])",
        ),
    ],
    ids=["milestones", "part", "sequence"],
)
def test_nested_arguments_and_milestones_are_compared(tmp_path, capsys, make, message):
    resumed_with(tmp_path, lambda optimizer: make(optimizer, 2), lambda optimizer: make(optimizer, 3))
    assert message in capsys.readouterr().out


class Decay(lr_scheduler.LRScheduler):
    def __init__(self, optimizer, rate, scale=1.0):
        self.rate, self.scale = rate, scale
        super().__init__(optimizer)

    def get_lr(self):
        self.scale /= 2  # an attribute that changes, although it has the name of an argument
        return [
            group["initial_lr"] / (1 + self.rate * self.last_epoch) for group in self.optimizer.param_groups
        ]


class Power:
    def __init__(self, base):
        self.base, self.calls = base, 0

    def __repr__(self):
        return f"Power({self.base})"

    def __call__(self, epoch):
        self.calls += 1
        return self.base**epoch


SCHEDULES = {
    "OneCycleLR": (
        dict(max_lr=0.5, total_steps=20),
        [dict(max_lr=0.9), dict(pct_start=0.6), dict(final_div_factor=5.0), dict(anneal_strategy="linear")],
    ),
    "CyclicLR": (
        dict(base_lr=0.01, max_lr=0.5, step_size_up=4),
        [dict(max_lr=0.9), dict(step_size_up=8), dict(mode="triangular2"), dict(base_momentum=0.5)],
    ),
    "SWALR": (dict(swa_lr=0.05), [dict(swa_lr=0.01), dict(anneal_epochs=3), dict(anneal_strategy="linear")]),
    "CosineAnnealingWarmRestarts": (dict(T_0=2), [dict(eta_min=0.01)]),
    "LambdaLR": (
        dict(lr_lambda=Power(0.9)),
        [dict(lr_lambda=Power(0.5))],
    ),
    "Decay": (dict(rate=0.1), [dict(rate=0.2)]),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, (_, changes) in SCHEDULES.items() for change in [{}, *changes]],
    ids=str,
)
def test_each_changed_argument_of_a_resumed_torch_scheduler_is_reported(tmp_path, capsys, name, change):
    def make(**changes):
        kind = getattr(lr_scheduler, name, None) or getattr(swa_utils, name, Decay)
        return lambda optimizer: kind(optimizer, **copy.deepcopy({**SCHEDULES[name][0], **changes}))

    by_epoch = None if name.endswith(("CycleLR", "CyclicLR")) else True
    resumed_with(tmp_path, make(), make(**change), by_epoch)
    text = capsys.readouterr().out
    assert ("torch restores the old schedule" in text or "is not used" in text) == bool(change), text


def change_checkpoint(path, change):
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint["param_schedulers"][0])
    torch.save(checkpoint, path)


@pytest.mark.parametrize("initial", [None, 3, {"parts": 5}, {"parts": ["a"], "class": 1}], ids=str)
def test_missing_or_damaged_arguments_in_a_checkpoint_do_not_prevent_resuming(tmp_path, initial):
    Runner(**arguments(tmp_path, cosine, train_cfg=dict(by_epoch=True, max_epochs=2))).train()
    change_checkpoint(tmp_path / "epoch_2.pth", lambda state: state.update(initial=initial))
    Runner(**arguments(tmp_path, cosine, resume=True)).train()


def test_changed_length_is_rejected_for_a_checkpoint_without_the_arguments(tmp_path):
    def cycle(steps):
        return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)

    Runner(**arguments(tmp_path, cycle(10), train_cfg=dict(by_epoch=True, max_epochs=2))).train()
    change_checkpoint(tmp_path / "epoch_2.pth", lambda state: state.pop("initial"))
    with pytest.raises(CheckpointError, match=r"total_steps=15 \(before: 10\)"):
        Runner(**arguments(tmp_path, cycle(15), resume=True)).train()


def test_scheduler_object_of_a_second_runner_is_not_reported(tmp_path, capsys):
    first = arguments(tmp_path, cosine, train_cfg=dict(by_epoch=True, max_epochs=2), log_level="WARNING")
    Runner(**first).train()
    Runner(**{**first, "train_cfg": dict(by_epoch=True, max_epochs=3), "resume": True}).train()
    assert "created with other arguments" not in capsys.readouterr().out


def test_changed_class_of_a_resumed_torch_scheduler_is_reported(tmp_path, capsys):
    resumed_with(
        tmp_path,
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3]),
    )
    assert "MultiStepLR continues with the state of StepLR in" in capsys.readouterr().out


def test_torch_epoch_schedulers_are_rejected_in_iteration_based_training(tmp_path):
    changed = arguments(tmp_path, cosine, train_cfg=dict(by_epoch=False, max_iters=4))
    with pytest.raises(
        ConfigError, match=r"CosineAnnealingLR steps after each epoch, but training is iteration-based"
    ):
        Runner(**changed).train()
    runner = Runner(**arguments(tmp_path / "by_iteration", cosine, False, train_cfg=changed["train_cfg"]))
    runner.train()
    assert runner.optim_wrapper.get_lr()["lr"] == pytest.approx([0.025])  # step 4 of a cosine with period 6


@pytest.mark.parametrize("short", [dict(fast_dev_run=True), dict(limit_train_batches=2)], ids=str)
def test_schedule_for_the_full_run_is_not_reported_in_a_short_run(tmp_path, capfd, short):
    full = dict(arguments(tmp_path, one_cycle), log_level="WARNING", **short)
    Runner(**full).train()
    captured = capfd.readouterr()
    assert "total_steps" not in captured.out + captured.err


def test_one_cycle_that_is_too_short_is_rejected(tmp_path):
    short = copy.copy(arguments(tmp_path, lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=9)))
    with pytest.raises(ConfigError, match="total_steps=9, but the run has 15 iterations"):
        Runner(**short).train()


def warnings_of(work_dir, capfd, **changes):
    Runner(**{**training(work_dir), "log_level": "WARNING", **changes}).train()
    captured = capfd.readouterr()
    return captured.out + captured.err


def test_schedules_in_the_wrong_unit_are_reported(tmp_path, capfd):
    net, optimizer, _ = parts(cosine)
    long = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    changes = dict(model=net, optim_wrapper=optimizer, train_dataloader=loader(data()))
    text = warnings_of(tmp_path / "torch", capfd, **changes, param_scheduler=long)
    assert "T_max=10, but it steps once per epoch, and the run has only 2 epochs" in text
    own = dict(type="OneCycleLR", eta_max=0.5, total_steps=10)
    text = warnings_of(tmp_path / "own", capfd, param_scheduler=own)
    assert "OneCycleLR has total_steps=10, but it steps once per epoch" in text
    text = warnings_of(
        tmp_path / "iterations",
        capfd,
        param_scheduler=dict(type="StepLR", step_size=1),
        train_cfg=dict(by_epoch=False, max_iters=3),
    )
    assert "StepLR steps after each epoch, but training is iteration-based" in text


def test_scheduler_objects_are_rejected_with_auto_scale_lr(tmp_path):
    changed = arguments(tmp_path, cosine, auto_scale_lr=dict(enable=True, base_batch_size=16))
    with pytest.raises(ConfigError, match="created before auto_scale_lr"):
        Runner(**changed).train()
