"""Tests of early stopping, plateau schedulers, log lines, images, profiler traces, step times and hook priorities."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from slipstream.hooks import Hook, Priority, get_priority
from slipstream.model import Segmentor
from slipstream.visualization import contact_sheet
from tiny_runs import LOCAL, Net, Scripted, loader, run, samples, scalars, validation


def stopped(folder, values, name="acc", **options):
    """Return the number of epochs of a run with early stopping."""
    hook = dict(type="EarlyStoppingHook", **{"monitor": name, "min_delta": 0.0, "patience": 2, **options})
    runner = run(
        folder,
        train_cfg=dict(by_epoch=True, max_epochs=len(values)),
        train_dataloader=loader(batch_size=40),
        custom_hooks=[hook],
        default_hooks=dict(checkpoint=None),
        **validation(Scripted(values, name)),
    )
    return runner.epoch


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.9], {}, 4),
        ([0.1, 0.15, 0.19, 0.9, 0.9], dict(min_delta=0.1), 3),
        ([0.1, 0.5, 0.6, 0.7, 0.8], dict(stopping_threshold=0.55), 3),
        ([0.1, 0.5, float("nan"), 0.7, 0.8], {}, 3),
        ([float("nan"), 0.5, 0.45, 0.45, 0.1], dict(check_finite=False, rule="less", min_delta=0.1), 4),
        ([0.5, 0.6, 0.7, 0.2, 0.1], dict(rule="less"), 3),
        ([0.5, 0.4, 0.3, 0.2], dict(rule="less", stopping_threshold=0.35), 3),
    ],
)
def test_early_stopping_ends_training_at_the_expected_epoch(tmp_path, values, options, epochs):
    assert stopped(tmp_path, values, **options) == epochs


def test_patience_is_restored_in_a_resumed_run(tmp_path):
    def epochs(values, count, **changes):
        return run(
            tmp_path,
            train_cfg=dict(by_epoch=True, max_epochs=count),
            custom_hooks=[dict(type="EarlyStoppingHook", monitor="acc", patience=3, min_delta=0.0)],
            **validation(Scripted(values)),
            **changes,
        )

    epochs([0.5, 0.4, 0.4], 3)
    # The last checkpoint was written before the last validation, so this validation runs again.
    assert epochs([0.4, 0.4, 0.4], 10, resume=True).epoch == 4


def test_learning_rate_decreases_on_a_plateau(tmp_path):
    schedule = dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater", factor=0.1, patience=1, begin=2)
    runner = run(
        tmp_path,
        train_cfg=dict(by_epoch=True, max_epochs=6),
        train_dataloader=loader(batch_size=40),
        param_scheduler=schedule,
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        **validation(Scripted([0.9, 0.5, 0.4, 0.4, 0.4, 0.4])),
    )
    rates = [line["lr"] for line in scalars(runner) if "lr" in line]
    # Epoch 1 is ignored, epoch 2 is the best (0.5), epochs 3 and 4 are worse. The rate decreases in epoch 5.
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("options", "loop", "steps"),
    [
        (dict(interval=2), dict(by_epoch=True, max_epochs=2), [2, 4, 5, 7, 9, 10]),
        (dict(interval=2, ignore_last=True), dict(by_epoch=True, max_epochs=2), [2, 4, 7, 9]),
        (dict(interval=3), dict(by_epoch=False, max_iters=10), [3, 6, 9, 10]),
        (dict(interval=3, ignore_last=True), dict(by_epoch=False, max_iters=10), [3, 6, 9]),
    ],
)
def test_steps_are_logged_at_the_interval(tmp_path, options, loop, steps):
    runner = run(tmp_path, train_cfg=loop, default_hooks=dict(logger=dict(type="LoggerHook", **options)))
    assert [line["iter"] for line in scalars(runner) if "loss" in line] == steps


def grouped(*names):
    """Return a network, and an optimizer whose groups have different learning rates."""
    net = Net()
    params = [[net.first.weight, net.first.bias], [net.last.weight], [net.last.bias]]
    groups = zip(params, [0.1, 0.02, 0.02], names, strict=True)
    return net, torch.optim.SGD(
        [{"params": p, "lr": lr, **({"name": n} if n else {})} for p, lr, n in groups]
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((None, None, None), {"lr/0": 0.1, "lr/1": 0.02}),  # the third rate (0.02) is not logged again
        (("body", "head", "bias"), {"lr/body": 0.1, "lr/head": 0.02, "lr/bias": 0.02}),
        ((None, "head", None), {"lr/0": 0.1, "lr/head": 0.02}),
    ],
)
def test_rates_of_all_parameter_groups_are_logged(tmp_path, capfd, names, expected):
    net, optimizer = grouped(*names)
    runner = run(tmp_path, model=net, optim_wrapper=optimizer, log_level="INFO")
    line = scalars(runner)[-1]
    assert {name: value for name, value in line.items() if name.startswith("lr/")} == pytest.approx(expected)
    text = capfd.readouterr().out
    assert all(f"{name}: {rate:.4e}" in text for name, rate in expected.items())


@pytest.mark.parametrize(("by_epoch", "steps"), [(True, [1, 2]), (False, [5, 10])])
def test_metrics_are_plotted_over_epochs_or_steps(tmp_path, by_epoch, steps):
    hooks = dict(logger=dict(type="LoggerHook", log_metric_by_epoch=by_epoch))
    runner = run(tmp_path, default_hooks=hooks, **validation(Scripted([0.25, 0.5])))
    metrics = [line for line in scalars(runner) if "acc" in line]
    assert [line["acc"] for line in metrics] == [0.25, 0.5]
    assert [line["step"] for line in metrics] == steps


class Scenes(Dataset):
    metainfo: ClassVar = dict(classes=("a", "b"), palette=[[0, 0, 0], [255, 0, 0]], ignore_index=255)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = torch.full((3, 16, 32), 60 * index, dtype=torch.uint8)
        return {"inputs": image, "targets": torch.full((16, 32), index % 2, dtype=torch.uint8)}


class Scenery(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, inputs):
        return self.conv(inputs.float())


def pictured(folder, dataset, **options):
    hook = dict(type="SegVisualizationHook", **options)
    metric = dict(val_cfg=dict(), val_evaluator=Scripted([0.1, 0.2]))
    scenes = dict(batch_size=2, dataset=dataset)
    return run(
        folder,
        model=Segmentor(Scenery()),
        train_dataloader=dict(scenes),
        val_dataloader=dict(scenes),
        custom_hooks=[hook],
        **metric,
    )


@pytest.mark.parametrize("count", [1, 3])
def test_predictions_are_drawn_next_to_the_ground_truth(tmp_path, count):
    runner = pictured(tmp_path, Scenes(), num_samples=count)
    sheet = Image.open(tmp_path / "predictions.png").convert("RGB")
    blank = np.zeros((16, 32, 3), np.uint8)
    legend = [("a", [0, 0, 0]), ("b", [255, 0, 0])]
    assert sheet.size == contact_sheet([[blank] * 3] * count, legend=legend).size
    truths = np.asarray(sheet)[:, sheet.width // 2]  # a vertical line through the ground truths
    reds = (truths == [255, 0, 0]).all(1).sum()
    assert reds == (
        160 if count == 3 else 0
    )  # the second of three samples is red, and 16 x 32 is enlarged to 160 x 320
    assert len(list(Path(runner.log_dir).rglob("*.png"))) == 2  # one image per validation


def test_profiler_writes_a_trace(tmp_path):
    run(tmp_path, custom_hooks=[dict(type="ProfilerHook", profile_times=2)])
    (trace,) = (tmp_path / "profile").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
    assert len(steps) == 2


def test_step_times_are_logged(tmp_path):
    runner = run(tmp_path, visualizer=LOCAL, default_hooks=dict(logger=dict(type="LoggerHook", interval=1)))
    for line in scalars(runner):
        assert 0 <= line["data_time"] <= line["time"]
    times = runner.message_hub.get_scalar("train/time")
    assert len(times) == 10
    assert runner.message_hub.get_info("images_per_second") > 0


def test_hooks_are_part_of_the_step_time_but_not_of_the_data_time(tmp_path, monkeypatch):
    """On the simulated clock, a batch takes 1 s, and a hook before and a hook after the step take 4 s each."""
    now = [0.0]
    for module in ("logging.phases", "hooks.timing"):
        monkeypatch.setattr(f"slipstream.{module}.perf_counter", lambda: now[0])

    class Waits(TensorDataset):
        def __getitem__(self, index):
            now[0] += 1.0 / 8
            return super().__getitem__(index)

    class Before(Hook):
        priority = "VERY_HIGH"

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            now[0] += 4.0

    class After(Hook):
        priority = "LOW"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            now[0] += 4.0

    runner = run(
        tmp_path,
        train_dataloader=loader(Waits(*samples())),
        train_cfg=dict(by_epoch=False, max_iters=10),
        custom_hooks=[Before(), After()],
    )
    hub = runner.message_hub
    assert hub.get_scalar("train/data_time").data[0].tolist() == [1.0] * 10
    assert hub.get_scalar("train/time").data[0].tolist() == [5.0] + [9.0] * 9
    assert hub.get_info("recent_speed")["waiting_for_data"] == pytest.approx(10 / 86)


def test_priorities_have_mmengine_numbers():
    numbers = dict(HIGHEST=0, VERY_HIGH=10, HIGH=30, ABOVE_NORMAL=40, NORMAL=50, BELOW_NORMAL=60)
    numbers |= dict(LOW=70, VERY_LOW=90, LOWEST=100)
    assert {name: get_priority(name.lower()) for name in Priority.__members__} == numbers
    assert get_priority(30) == 30


@pytest.mark.parametrize(
    ("n", "start", "due"), [(1, 0, [1, 2, 3, 4]), (2, 0, [2, 4]), (2, 1, [3]), (0, 0, []), (-1, 0, [])]
)
def test_every_n_selects_the_due_epochs_and_iterations(n, start, due):
    class At:
        def __init__(self, done):
            self.epoch = self.iter = done

    hook = Hook()
    assert [e for e in range(1, 5) if hook.every_n_epochs(At(e - 1), n, start)] == due
    assert [i for i in range(1, 5) if hook.every_n_train_iters(At(i - 1), n, start)] == due
