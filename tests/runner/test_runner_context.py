"""Tests of calling the Runner's methods from its hooks, and after a run that ended with an error."""

import pytest

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook, Hook
from slipstream.runner import Runner
from tiny_runs import Accuracy, Losses, Net, assert_same, loader, training, validation, weights


class AtStage(Hook):
    """A hook that calls `call(runner)` once, at the first `stage` at which `runner.iter` is at least `iteration`."""

    def __init__(self, stage, call, iteration=0):
        self.stage, self.call, self.iteration = stage, call, iteration

    def _at(self, stage, runner):
        if stage == self.stage and runner.iter >= self.iteration:
            self.stage = None
            self.call(runner)

    def before_run(self, runner):
        self._at("before_run", runner)

    def before_train_epoch(self, runner):
        self._at("before_train_epoch", runner)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self._at("before_train_iter", runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self._at("after_train_iter", runner)

    def after_train_epoch(self, runner):
        self._at("after_train_epoch", runner)

    def before_val(self, runner):
        self._at("before_val", runner)

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self._at("after_val_iter", runner)


class RunStages(Hook):
    """A hook that records the start, the end and the release of runs."""

    def __init__(self):
        self.calls = []

    def before_run(self, runner):
        self.calls.append("before_run")

    def after_run(self, runner):
        self.calls.append("after_run")

    def release(self, runner):
        self.calls.append("release")


def evaluated(work_dir, *hooks, **changes):
    """Return a Runner that draws random numbers in training and evaluation, and the dict of its losses by step."""
    losses = Losses()
    options = training(
        work_dir,
        model=dict(type=Net, dropout=0.3, norm=True),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        custom_hooks=[losses, EMAHook(momentum=0.1), *hooks],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best="acc")),
        test_dataloader=loader(shuffle=True),
        test_cfg=dict(),
        test_evaluator=dict(type=Accuracy),
        **validation(),
    )
    return Runner(**{**options, **changes}), losses.by_iter


def files(folder):
    return sorted(path.name for path in folder.glob("*.pth") if not path.name.startswith("best"))


@pytest.mark.parametrize("stage", ["after_train_iter", "after_train_epoch"])
@pytest.mark.parametrize("mode", ["val", "test"])
def test_evaluation_in_a_hook_does_not_change_training(tmp_path, mode, stage):
    plain, expected = evaluated(tmp_path / "plain")
    plain.train()
    stages, results, states = RunStages(), [], []

    def evaluate(runner):
        results.append(getattr(runner, mode)())
        states.append((runner.is_training, runner.model.training, bool(runner.folder_lock._files)))

    runner, losses = evaluated(tmp_path / "hook", AtStage(stage, evaluate, 3), stages)
    runner.train()
    assert [set(metrics) for metrics in results] == [{"acc"}]
    assert states == [(True, True, True)]
    assert stages.calls == ["before_run", "after_run", "release"]
    assert_same(losses, expected)
    assert_same(weights(runner), weights(plain))
    assert files(tmp_path / "hook") == files(tmp_path / "plain")
    assert list((tmp_path / "hook").glob("best_acc_epoch_*.pth"))
    assert (runner.is_training, runner.folder_lock._files) == (False, {})


def fail(error):
    def call(runner):
        raise error

    return call


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["before_train_iter", "after_train_iter", "after_train_epoch"])
@pytest.mark.parametrize("by_epoch", [True, False])
def test_training_again_after_an_error_inside_an_epoch_raises_an_error(tmp_path, by_epoch, stage, error):
    cfg = dict(by_epoch=True, max_epochs=3) if by_epoch else dict(by_epoch=False, max_iters=13)
    runner, losses = evaluated(tmp_path, AtStage(stage, fail(error), 7), train_cfg=cfg)
    with pytest.raises(error):
        runner.train()
    steps = len(losses)
    text = rf"stopped in the middle of an epoch \({error.__name__}\).*create a new Runner with resume=True"
    for _ in range(2):
        with pytest.raises(ConfigError, match=text):
            runner.train()
    assert len(losses) == steps
    assert runner.val().keys() == {"acc"}


@pytest.mark.parametrize("stage", ["before_run", "before_train_epoch", "before_val", "after_val_iter"])
def test_training_continues_after_an_error_between_epochs(tmp_path, stage):
    plain, expected = evaluated(tmp_path / "plain")
    plain.train()
    start = 0 if stage == "before_run" else 5
    runner, losses = evaluated(tmp_path / "again", AtStage(stage, fail(RuntimeError), start))
    with pytest.raises(RuntimeError):
        runner.train()
    runner.train()
    assert_same(losses, expected)
    assert_same(weights(runner), weights(plain))
    metrics = [list(each.message_hub.get_scalar("val/acc").data[0]) for each in (plain, runner)]
    assert metrics[1] == metrics[0]
    assert len(metrics[0]) == 3
