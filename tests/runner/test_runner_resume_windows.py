"""Test that resumed accumulation windows use the mean gradient of their batches, as plain loops in float64 do."""

import copy
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from tiny_runs import Net, Stop, StoppedError, loader, run, samples, weights


def test_an_extended_run_averages_the_gradients_of_the_batches_since_the_last_update(tmp_path):
    inputs, targets = samples()
    torch.manual_seed(3)
    net = Net().double()
    changes = dict(
        train_dataloader=loader(TensorDataset(inputs.double(), targets), shuffle=False),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5), accumulative_counts=3),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
    )
    for epochs, stop in ((1, 99), (2, 7), (2, 99)):  # the second part stops inside a window
        model = Net().double()
        model.load_state_dict(net.state_dict())
        cfg = dict(model=model, train_cfg=dict(by_epoch=True, max_epochs=epochs), custom_hooks=[Stop(stop)])
        with suppress(StoppedError):
            run(tmp_path, **changes, **cfg, resume=epochs > 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for window in ((0, 1, 2), (3, 4), (5,), (6, 7, 8), (9,)):
        optimizer.zero_grad()
        for batch in window:
            rows = slice(batch % 5 * 8, batch % 5 * 8 + 8)
            (net(inputs[rows].double(), targets[rows], "loss")["loss"] / len(window)).backward()
        optimizer.step()
    torch.testing.assert_close(weights(SimpleNamespace(model=model)), net.state_dict())


@pytest.mark.parametrize(("batch_size", "accumulate", "last"), [(8, 3, 3), (8, 5, 5), (4, 4, 8), (4, 8, 8)])
def test_window_resumed_with_another_size_uses_the_mean_gradient(tmp_path, batch_size, accumulate, last):
    inputs, targets = samples()
    torch.manual_seed(3)
    net = Net().double()
    data = TensorDataset(inputs.double(), targets)

    def cfg(size, counts, iters):
        return dict(
            model=copy.deepcopy(net),
            train_dataloader=loader(data, shuffle=False, batch_size=size),
            train_cfg=dict(by_epoch=False, max_iters=iters),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5), accumulative_counts=counts),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
        )

    with pytest.raises(StoppedError):
        run(tmp_path, **cfg(8, 2, 5), custom_hooks=[Stop(1)])
    resumed = run(tmp_path, **cfg(batch_size, accumulate, last), resume=True)
    count = last * batch_size
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    windows = {4: [(0, 16), (16, 32)], 8: [(0, count)]}[batch_size] if accumulate == 4 else [(0, count)]
    for start, stop in windows:
        optimizer.zero_grad()
        net(inputs[start:stop].double(), targets[start:stop], "loss")["loss"].backward()
        optimizer.step()
    torch.testing.assert_close(weights(resumed), net.state_dict())
