"""After a rollback, the best checkpoints do not contain abandoned steps."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from slipstream.hooks import Hook
from slipstream.hooks.replaced_files import ReplacedFiles
from slipstream.logging import MessageHub
from slipstream.runner import Runner
from tiny_runs import Net, Scripted, assert_same, run, training, validation, weights

BEFORE, AFTER = [0.5, 0.7, 0.9], [0.6, 0.4]
"""Metric values before the rollback, and in epochs 3 and 4 after the rollback."""


class BreaksOnce(Net):
    """A model whose loss is NaN in step 18, which is in epoch 4."""

    calls = 0

    def forward(self, inputs, targets, mode):
        out = super().forward(inputs, targets, mode)
        if mode == "loss":
            self.calls += 1
            out["loss"] = out["loss"] * (math.nan if self.calls == 18 else 1)
        return out


class Weights(Hook):
    """A hook that stores the weights after each epoch. A repeated epoch overwrites its earlier weights."""

    def __init__(self):
        self.after = {}

    def before_val_epoch(self, runner):
        self.after[runner.epoch] = weights(runner)


def options(values, *hooks, **checkpoint):
    """Return the options of a run that rolls back from step 18 to the checkpoint of step 12, in epoch 3."""
    checkpoints = dict(type="CheckpointHook", interval=4, by_epoch=False, save_best="acc", **checkpoint)
    return dict(
        model=BreaksOnce(),
        train_cfg=dict(by_epoch=True, max_epochs=4),
        default_hooks=dict(checkpoint=checkpoints, logger=dict(type="LoggerHook", interval=1)),
        custom_hooks=list(hooks),
        speed=dict(nan_guard=dict(action="rollback", skip_before=4)),
        log_level="WARNING",
        **validation(Scripted(values)),
    )


@pytest.mark.parametrize(("name", "number"), [(None, "best_acc_iter_10.pth"), ("best.pth", "best.pth")])
@pytest.mark.parametrize("async_save", [False, True])
def test_best_checkpoint_of_abandoned_steps_is_replaced_by_the_previous_best(
    tmp_path, name, number, async_save
):
    states = Weights()
    made = options(BEFORE + AFTER, states, best_filename=name, async_save=async_save)
    runner = run(tmp_path, **made)
    assert runner.rollback.skipped == {13, 14, 15, 16, 17, 18}
    assert [path.name for path in tmp_path.glob("best*")] == [number]
    content = torch.load(tmp_path / number, weights_only=True)
    assert content["meta"]["iter"] == 10
    assert_same(content["state_dict"], states.after[2])
    infos = torch.load(tmp_path / "iter_20.pth", weights_only=True)["message_hub"]["runtime_info"]
    assert infos["best_score/acc"] == 0.7
    assert infos["best_ckpt/acc"] == number


@pytest.mark.parametrize("name", [None, "best.pth"])
def test_better_epoch_after_the_rollback_is_saved(tmp_path, name):
    states = Weights()
    run(tmp_path, **options([*BEFORE, 0.6, 0.8], states, best_filename=name))
    (path,) = tmp_path.glob("best*")
    assert_same(torch.load(path, weights_only=True)["state_dict"], states.after[4])


def test_best_checkpoint_is_removed_if_the_restored_checkpoint_has_none(tmp_path):
    values = [math.nan, math.nan, 0.9, math.nan, math.nan]
    run(tmp_path, **options(values))
    assert list(tmp_path.glob("best*")) == []


def test_epochs_of_abandoned_steps_are_not_averaged(tmp_path):
    states = Weights()
    average = dict(type="AverageBestHook", metric="acc", count=1)
    made = options([*BEFORE, *AFTER, 0.0], states, average)
    run(tmp_path, **made)
    assert [path.name for path in (tmp_path / "average_best").iterdir()] == ["epoch_2.pth"]
    assert_same(torch.load(tmp_path / "average_model.pth", weights_only=True)["state_dict"], states.after[2])


class Stop(Hook):
    priority = "LOWEST"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 17:
            runner.wait_for_checkpoint()
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", [None, "best.pth"])
def test_replaced_checkpoints_are_kept_only_while_the_run_can_roll_back(tmp_path, name):
    runner = Runner(**training(tmp_path, **options(BEFORE, Stop(), best_filename=name)))
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    assert len(list(tmp_path.glob("best*"))) == 3
    changes = options([0.1], best_filename=name) | dict(model=Net(), speed=None)
    run(tmp_path, **changes, resume=True)
    (path,) = tmp_path.glob("best*")
    assert torch.load(path, weights_only=True)["meta"]["iter"] == 15


def test_replaced_checkpoints_are_removed_with_the_checkpoints_that_refer_to_them(tmp_path):
    class Count(Hook):
        most = 0

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.most = max(self.most, len(list(tmp_path.glob("best*"))))

    count = Count()
    made = options([n / 10 for n in range(1, 9)], count, max_keep_ckpts=1)
    run(tmp_path, **made | dict(model=Net(), train_cfg=dict(by_epoch=True, max_epochs=8)))
    assert count.most <= 3
    assert len(list(tmp_path.glob("best*"))) == 1


def test_folder_of_a_sharded_checkpoint_is_restored(tmp_path):
    hub = MessageHub("x")
    rollback = SimpleNamespace(oldest=1, faults=(ValueError,))
    runner = SimpleNamespace(
        iter=10, message_hub=hub, rollback=rollback, wait_for_checkpoint=lambda: None, logger=None
    )
    files = ReplacedFiles("replaced_ckpts/acc", lambda name: True)
    files.load(runner, tmp_path)
    folder = tmp_path / "best.sharded"
    for text in ("one", "two"):  # written to a new folder, as `write_checkpoint` does
        if folder.exists():
            files.set_aside(runner, "best.sharded")
            shutil.rmtree(folder)
        folder.mkdir()
        (folder / "shard").write_text(text)
    hub.drop_saved()  # a checkpoint written before the replacement does not list the copy
    files.restore(runner, ["best.sharded"], ["best.sharded"])
    assert [path.name for path in tmp_path.iterdir()] == ["best.sharded"]
    assert (folder / "shard").read_text() == "one"
