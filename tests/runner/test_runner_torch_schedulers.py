"""Test that torch's scheduler objects in a Runner match plain loops that call `step` as torch documents."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from slipstream import Runner
from slipstream.errors import ConfigError
from slipstream.hooks import Hook
from slipstream.optim.scheduler import build_param_scheduler
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


def test_torch_epoch_schedulers_are_rejected_in_iteration_based_training(tmp_path):
    changed = arguments(tmp_path, cosine, train_cfg=dict(by_epoch=False, max_iters=4))
    with pytest.raises(
        ConfigError, match=r"CosineAnnealingLR steps after each epoch, but training is iteration-based"
    ):
        Runner(**changed).train()
    runner = Runner(**arguments(tmp_path / "by_iteration", cosine, False, train_cfg=changed["train_cfg"]))
    runner.train()
    assert runner.optim_wrapper.get_lr()["lr"] == pytest.approx([0.025])  # step 4 of a cosine with period 6


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
    assert "T_max=10, but the run has 2 epochs" in text
    own = dict(type="OneCycleLR", eta_max=0.5, total_steps=10)
    text = warnings_of(tmp_path / "own", capfd, param_scheduler=own)
    assert "OneCycleLR has total_steps=10, but the run has 2 epochs" in text
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


class Rates(Hook):
    def __init__(self):
        self.rates = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])


class EndsEarly(Hook):
    def after_train_epoch(self, runner):
        runner.train_loop.stop_training = True


UPDATES = 8  # windows of two batches, and a last window of one batch
PER_UPDATE = {
    "cosine": lambda schedule: dict(scheduler=schedule, interval="update"),
    "own": lambda _: dict(type="CosineAnnealingLR", interval="update"),
}


@pytest.mark.parametrize("speed", [{}, {"compile": {"backend": "eager"}}], ids=["eager", "compiled"])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", PER_UPDATE)
def test_schedules_can_step_once_per_update(tmp_path, name, resumed, speed):
    rates = Rates()

    def train(*hooks, **changes):
        net, optimizer, schedule = parts(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, UPDATES))
        options = dict(optim_wrapper=optimizer, param_scheduler=PER_UPDATE[name](schedule))
        options |= dict(train_dataloader=loader(data(), shuffle=False), speed=dict(accumulate=2, **speed))
        cfg, hooks = dict(by_epoch=True, max_epochs=3), [rates, *hooks]
        Runner(
            **training(tmp_path, model=net, train_cfg=cfg, custom_hooks=hooks, **options, **changes)
        ).train()

    if resumed:
        train(EndsEarly())
        assert len(rates.rates) == 5
    train(resume=resumed)
    plain = lr_scheduler.CosineAnnealingLR(torch.optim.SGD(Net().parameters(), lr=0.1), UPDATES)
    expected = []
    for batch in range(STEPS):
        expected.append(plain.get_last_lr()[0])
        if batch % 2 == 1:
            plain.optimizer.step()
            plain.step()
    assert rates.rates == pytest.approx(expected)


def test_a_schedule_that_may_count_updates_is_reported(tmp_path, capfd):
    for interval, reported in (({}, True), ({"interval": "update"}, False), ({"interval": "batch"}, False)):
        changes = arguments(tmp_path, inverse, False, speed=dict(accumulate=2), log_level="WARNING")
        scheduler = {
            key: value
            for key, value in changes["param_scheduler"].items()
            if key != "by_epoch" or not interval
        }
        Runner(**{**changes, "param_scheduler": {**scheduler, **interval}}).train()
        assert ("set interval='update'" in capfd.readouterr().out) == reported


def test_attributes_of_a_scheduler_are_not_those_of_its_adapter():
    class Poly(torch.optim.lr_scheduler.LambdaLR):
        end, by_epoch = 3, None

        def __init__(self, optimizer):
            self.end = 4
            super().__init__(optimizer, lambda step: max(0, 1 - step / self.end))

    scheduler = Poly(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    adapter = build_param_scheduler(
        dict(scheduler=scheduler, by_epoch=False), scheduler.optimizer, max_iters=9
    )
    assert (adapter.by_epoch, scheduler.by_epoch, scheduler.end) == (False, None, 4)
    adapter.step()
    assert adapter.get_last_value() == [0.75]
