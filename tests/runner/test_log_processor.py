from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.logging import MessageHub
from slipstream.runner.log_processor import LogProcessor


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return SimpleNamespace(
        message_hub=MessageHub("a"),
        epoch=0,
        iter=99,
        max_epochs=20,
        max_iters=10_000,
        train_dataloader=range(500),
        val_dataloader=range(50),
        test_dataloader=range(60),
    )


def fill(hub, mode="train", steps=20):
    for step in range(steps):
        hub.update_scalars(
            {
                f"{mode}/lr": 0.001,
                f"{mode}/time": 0.0123,
                f"{mode}/data_time": 0.0012,
                f"{mode}/loss": float(step),
                f"{mode}/acc": step / 100,
            }
        )
    hub.update_info("eta", 62.9)


def test_training_line_contains_epoch_and_batch(runner):
    fill(runner.message_hub)
    tag, line = LogProcessor().get_log_after_iter(runner, 99, "train")
    assert line == (
        "Epoch(train)  [1][100/500]  lr: 1.0000e-03  eta: 0:01:02  time: 0.0123  data_time: 0.0012  "
        "loss: 14.5000  acc: 0.1900"
    )
    assert tag == {
        "lr": 0.001,
        "time": pytest.approx(0.0123),
        "data_time": pytest.approx(0.0012),
        "loss": np.mean(range(10, 20)),
        "acc": 0.19,
        "epoch": 1,
        "iter": 100,
    }


def test_training_line_of_iteration_based_training_contains_no_epoch(runner):
    fill(runner.message_hub)
    tag, line = LogProcessor(by_epoch=False, num_digits=2).get_log_after_iter(runner, 99, "train")
    assert line.startswith("Iter(train) [  100/10000]  lr: 1.00e-03  eta: 0:01:02  time: 0.01")
    assert "epoch" not in tag


def test_validation_line_within_the_epoch_shows_only_losses(runner):
    runner.epoch = 1
    fill(runner.message_hub, "val")
    tag, line = LogProcessor().get_log_after_iter(runner, 9, "val")
    assert line.startswith("Epoch(val)  [1][10/50]  lr: 1.0000e-03  eta: 0:01:02")
    assert line.endswith("loss: 14.5000")
    assert (tag["iter"], tag["epoch"]) == (99, 1)


def test_line_after_validation_averages_times_over_the_epoch(runner):
    runner.epoch = 3
    hub = runner.message_hub
    for step in range(70):
        hub.update_scalars({"val/time": float(step), "val/data_time": 0.5})
    hub.update_scalar("val/mIoU", 0.71234)
    tag, line = LogProcessor().get_log_after_epoch(runner, 50, "val")
    assert line == "Epoch(val)  [3][50/50]  mIoU: 0.7123  data_time: 0.5000  time: 44.5000"
    assert tag == {"time": 44.5, "data_time": 0.5, "mIoU": 0.71234}


def test_line_after_test_contains_non_scalars(runner):
    runner.message_hub.update_scalar("test/acc", 0.5)
    runner.message_hub.update_info("test/confusion", torch.eye(2))
    processor = LogProcessor(by_epoch=False)
    tag, line = processor.get_log_after_epoch(runner, 60, "test")
    assert line.startswith("Iter(test) [60/60]  acc: 0.5000  confusion: \ntensor(")
    assert set(tag) == {"acc"}
    tag, _ = processor.get_log_after_epoch(runner, 60, "test", with_non_scalar=True)
    assert set(tag) == {"acc", "confusion"}


def test_validation_loss_is_not_averaged_with_earlier_validations(runner):
    for loss in (0.9, 0.5, 0.1):
        runner.message_hub.update_metric("val/loss", loss)
    tag, line = LogProcessor().get_log_after_epoch(runner, 50, "val")
    assert tag["loss"] == 0.1
    runner.message_hub.update_scalar("train/loss", 3.0)
    assert LogProcessor().get_log_after_epoch(runner, 50, "val")[0] == {"val/loss": 0.1}
    assert "loss: 0.1000" in line
    assert "loss" not in LogProcessor().get_log_after_iter(runner, 9, "val")[1]


def test_custom_statistics_accept_every_kind_of_window_size(runner):
    fill(runner.message_hub, steps=200)
    entries = [
        {"data_src": "loss", "method_name": "mean", "window_size": "epoch", "log_name": "loss_epoch"},
        {"data_src": "loss", "method_name": "min", "window_size": "global", "log_name": "loss_global"},
        {"data_src": "loss", "method_name": "max", "window_size": 3, "log_name": "loss_max"},
        {"data_src": "loss", "method_name": "mean", "log_name": "loss_all"},
        {"data_src": "acc", "method_name": "max"},
        {"data_src": "absent", "method_name": "max"},
    ]
    tag, line = LogProcessor(custom_cfg=entries).get_log_after_iter(runner, 49, "train")
    assert tag["loss_epoch"] == np.mean(range(150, 200))
    assert tag["loss_global"] == 100  # the newest runner.iter + 1 entries
    assert tag["loss_max"] == 199
    assert tag["loss_all"] == np.mean(range(200))
    assert tag["acc"] == 1.99
    assert "loss_max: 199.0000" in line
    assert "absent" not in tag


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("loss", r"custom_cfg\[1\]: must be a dict with a string 'data_src'"),
        ({"data_src": "a", "method_name": "maen"}, r"custom_cfg\[1\]: .*did you mean 'mean'"),
        ({"data_src": "a", "method_name": "mean", "windows": 3}, r"custom_cfg\[1\]: .*windows"),
        ({"data_src": "a", "method_name": "mean", "window_size": 0}, r"\[1\].window_size: must be an int"),
        (
            {"data_src": "loss", "method_name": "max"},
            r"custom_cfg\[1\].log_name: another entry also logs 'loss'",
        ),
    ],
)
def test_invalid_custom_entry_error_names_its_path(entry, message):
    with pytest.raises(ConfigError, match=message):
        LogProcessor(custom_cfg=[{"data_src": "loss", "method_name": "mean"}, entry])
