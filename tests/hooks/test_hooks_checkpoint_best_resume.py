"""Test that a resumed run keeps its best score and its best checkpoint."""

from pathlib import Path

import pytest
import torch

from tiny_runs import Scripted, run, validation


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (dict(save_best="acc"), ["best_acc_epoch_1.pth", "best_acc_epoch_3.pth"]),
        (dict(save_best="auto"), ["best_acc_epoch_1.pth", "best_acc_epoch_3.pth"]),
        (dict(save_best="acc", best_filename="top/one.pth"), ["top/one.pth", "top/one.pth"]),
        (dict(save_best="acc", out_dir="{out}"), ["best_acc_epoch_1.pth", "best_acc_epoch_3.pth"]),
    ],
    ids=["name", "auto", "best_filename", "out_dir"],
)
def test_longer_run_keeps_the_best_checkpoint_of_its_last_validation(tmp_path, options, names):
    options = {key: value.format(out=tmp_path / "out") for key, value in options.items()}
    hooks = dict(checkpoint=dict(type="CheckpointHook", rule="greater", **options))

    def train(epochs, values, **changes):
        evaluation = validation([dict(type=Scripted, values=values, name="acc")])
        cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=2)
        runner = run(tmp_path / "work", train_cfg=cfg, default_hooks=hooks, **evaluation, **changes)
        best = [path for pattern in ("best_*.pth", "one.pth") for path in tmp_path.rglob(pattern)]
        return runner.message_hub.get_info("best_score/acc"), [path.name for path in best]

    first, last = ([Path(name).name] for name in names)
    train(1, [0.9])  # validates at its end, after the last checkpoint has been written
    assert train(2, [0.5], resume=True) == (0.9, first)
    assert train(3, [0.5, 0.95], resume=True) == (0.95, last)  # repeats the validation after epoch 2


def test_resumed_run_does_not_replace_its_best_score_by_a_worse_one(tmp_path):
    def train(epochs, values, resume):
        evaluation = validation([dict(type=Scripted, values=values, name="acc")])
        hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, save_best="acc", rule="greater"))
        cfg = dict(by_epoch=True, max_epochs=epochs)
        runner = run(tmp_path, train_cfg=cfg, default_hooks=hooks, resume=resume, **evaluation)
        return [runner.message_hub.get_info(f"best_{name}/acc") for name in ("score", "ckpt")]

    train(2, [0.1, 0.2], False)  # a resumed run repeats the validation after its checkpoint
    assert train(4, [0.2, 0.3, 0.6], True) == [0.6, "best_acc_epoch_4.pth"]
    assert train(4, [0.2, 0.9, 0.5], str(tmp_path / "epoch_2.pth")) == [0.9, "best_acc_epoch_3.pth"]
    assert train(5, [0.5, 0.7], True) == [0.9, "best_acc_epoch_3.pth"]  # epoch 4 of the first run had 0.6


@pytest.mark.parametrize(
    "hub",
    [
        5,
        {"runtime_info": 5},
        {"runtime_info": {"best_score/acc": "high", "best_ckpt/acc": "best_acc_epoch_1.pth"}},
    ],
    ids=str,
)
def test_damaged_score_in_a_best_checkpoint_is_ignored(tmp_path, hub):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, save_best="acc", rule="greater"))

    def train(epochs, **changes):
        evaluation = validation([dict(type=Scripted, values=[0.5, 0.5], name="acc")])
        cfg = dict(by_epoch=True, max_epochs=epochs)
        return run(tmp_path, train_cfg=cfg, default_hooks=hooks, **evaluation, **changes)

    train(1)
    path = tmp_path / "best_acc_epoch_1.pth"
    torch.save({**torch.load(path, weights_only=True), "message_hub": hub}, path)
    assert train(2, resume=True).message_hub.get_info("best_score/acc") == 0.5


def test_best_checkpoint_of_another_hook_is_not_used_when_a_run_is_resumed(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, save_best="auto"))
    other = dict(type="CheckpointHook", save_best="foo", rule="greater", filename_tmpl="other_{}.pth")
    for epochs in (1, 2):
        evaluation = validation(
            [
                dict(type=Scripted, values=[0.5, 0.5], name="acc"),
                dict(type=Scripted, values=[7, 6], name="foo"),
            ]
        )
        cfg = dict(by_epoch=True, max_epochs=epochs)
        changes = dict(default_hooks=hooks, custom_hooks=[other], resume=epochs > 1, **evaluation)
        hub = run(tmp_path, train_cfg=cfg, **changes).message_hub
    assert (hub.get_info("best_score/acc"), hub.get_info("best_score/foo")) == (0.5, 7)
