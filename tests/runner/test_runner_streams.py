"""Test that epoch-based training on iterable datasets without a length matches plain loops in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from slipstream import Runner
from slipstream.errors import CheckpointError
from slipstream.hooks import Hook
from tiny_runs import assert_same, samples, scalars, training, weights


class Stream(IterableDataset):
    """A stream whose number of samples depends on the epoch: 40, 32, 24."""

    def __init__(self, count=40):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        inputs, targets = samples(40)
        shown = range(8 * self.epoch, self.count)
        return ((inputs[i].double(), targets[i]) for i in shown)


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches():
    """Return the batches of three epochs."""
    inputs, targets = samples(40)
    return [
        (inputs[i : i + 8].double(), targets[i : i + 8])
        for epoch in range(3)
        for i in range(8 * epoch, 40, 8)
    ]


def arguments(work_dir, dataset=None, **changes):
    return {
        **training(work_dir, model=net(), loss_fn=F.cross_entropy),
        "train_dataloader": DataLoader(dataset or Stream(), batch_size=8),
        "train_cfg": dict(by_epoch=True, max_epochs=3),
        "optim_wrapper": dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        **changes,
    }


def by_hand(window=1, decay=None, schedule=None):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = schedule(optimizer) if schedule else None
    average = None
    for number, (inputs, targets) in enumerate(batches(), 1):
        (F.cross_entropy(model(inputs), targets) / window).backward()
        if number % window == 0:
            optimizer.step()
            optimizer.zero_grad()
            now = {name: value.clone() for name, value in model.state_dict().items()}
            if average is not None and decay:
                now = {name: decay * average[name] + (1 - decay) * now[name] for name in now}
            average = now
        if steps:
            steps.step()
    return model.state_dict(), average


def assert_close(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-9, atol=1e-12)


COMPILED = dict(compile=dict(backend="eager"))


@pytest.mark.parametrize(
    "speed", [{}, COMPILED, dict(COMPILED, accumulate=3), dict(prefetch=2, gc=2, nan_guard="skip")], ids=str
)
def test_epoch_ends_with_the_stream(tmp_path, speed):
    runner = Runner(**arguments(tmp_path, speed=speed))
    runner.train()
    assert (runner.epoch, runner.iter) == (3, 12)
    assert_close(runner.model.state_dict(), by_hand(speed.get("accumulate", 1))[0])
    assert (tmp_path / "epoch_3.pth").exists()
    assert not runner.knows_length
    # The epochs are shorter than the log interval, so only the last step of each epoch is logged.
    assert [line["iter"] for line in scalars(runner) if "loss" in line] == [5, 9, 12]


class Stop(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 7:
            raise KeyboardInterrupt


@pytest.mark.parametrize("speed", [{}, dict(accumulate=3)], ids=str)
def test_run_on_a_stream_can_be_resumed_inside_an_epoch(tmp_path, speed):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=7))
    changes = dict(default_hooks=hooks, speed=speed)
    stopped = Runner(**arguments(tmp_path, **changes, custom_hooks=[dict(type=Stop, priority="LOWEST")]))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = Runner(**arguments(tmp_path, **changes, resume=True))
    resumed.train()
    assert resumed.iter == 12
    assert_close(resumed.model.state_dict(), by_hand(speed.get("accumulate", 1))[0])


class NoisyStream(IterableDataset):
    """A stream whose samples are divided among the workers, which add random noise."""

    def __iter__(self):
        info = get_worker_info()
        for x, y in list(zip(*samples(40), strict=True))[info.id :: info.num_workers]:
            yield (x + torch.randn(4)).double(), y


def augmented(work_dir, as_loader=False, epochs=2, loader=None, **changes):
    options = dict(batch_size=8, dataset=NoisyStream())
    data = [{**options, "num_workers": workers, **(loader or {})} for workers in (2, 1)]
    train, val = [DataLoader(**options) if as_loader else options for options in data]
    changes |= dict(train_dataloader=train, val_dataloader=val, val_cfg=dict(), val_evaluator="loss")
    runner = Runner(**arguments(work_dir, train_cfg=dict(by_epoch=True, max_epochs=epochs), **changes))
    runner.train()
    return runner


@pytest.mark.parametrize("as_loader", [False, True], ids=["dict", "DataLoader"])
@pytest.mark.parametrize("inside", [False, True], ids=["after an epoch", "inside an epoch"])
def test_resumed_run_repeats_the_random_numbers_of_a_streams_workers(tmp_path, as_loader, inside):
    whole = augmented(tmp_path / "whole", as_loader)
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=not inside, interval=7 if inside else 1))
    last = dict(type=Stop, priority="LOWEST")
    if inside:
        with pytest.raises(KeyboardInterrupt):
            augmented(tmp_path / "parts", as_loader, default_hooks=hooks, custom_hooks=[last])
    else:
        augmented(tmp_path / "parts", as_loader, epochs=1, default_hooks=hooks)
    resumed = augmented(tmp_path / "parts", as_loader, resume=True)
    assert resumed.iter == whole.iter == 12
    assert_same(weights(whole), weights(resumed))
    losses = [runner.message_hub.get_scalar("val/loss").current() for runner in (whole, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("loader", "change"),
    [
        (dict(num_workers=1), r"num_workers=2 \(now 1\)"),
        (dict(batch_size=4), r"samples per step=8 \(now 4\)"),
        ({}, r"processes=2 \(now 1\)"),
    ],
)
def test_stream_whose_order_has_changed_resumes_only_between_epochs(tmp_path, loader, change):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=7))
    augmented(tmp_path, epochs=1)
    augmented(tmp_path / "between", loader=loader, resume=str(tmp_path / "epoch_1.pth"))
    with pytest.raises(KeyboardInterrupt):
        augmented(tmp_path, default_hooks=hooks, custom_hooks=[dict(type=Stop, priority="LOWEST")])
    if not loader:  # make the checkpoint look like one from two processes
        file = tmp_path / "iter_7.pth"
        checkpoint = torch.load(file, weights_only=True)
        checkpoint["meta"]["random_state"] *= 2
        torch.save(checkpoint, file)
    with pytest.raises(CheckpointError, match=rf"iter_7\.pth .*{change}.* iterable dataset"):
        augmented(tmp_path, loader=loader, resume=True)
