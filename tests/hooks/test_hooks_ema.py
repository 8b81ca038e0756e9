"""The average is what is validated and saved; the weights go on as if there were none."""

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook, Hook
from slipstream.runner import Runner
from tiny_runs import Accuracy, Net, assert_same, loader, run, training, validation, weights


class History(Hook):
    """Keeps the weights after each step and those that a validation or test sees."""

    priority = "VERY_LOW"

    def __init__(self):
        self.steps, self.validated = [], []

    def before_train(self, runner):
        self.start = weights(runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps.append(weights(runner))

    def _before_iter(self, runner, batch_idx, data_batch=None, mode="train"):
        if mode != "train" and batch_idx == 0:
            self.validated.append(weights(runner))


def average(steps, momentum):
    """The textbook's, in double precision."""
    mean = {name: value.double() for name, value in steps[0].items()}
    for step in steps[1:]:
        mean = {name: (1 - momentum) * mean[name] + momentum * step[name].double() for name in mean}
    return {name: value.float() for name, value in mean.items()}


def assert_close(one, other):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], msg=name)


def ema_run(folder, *hooks, **changes):
    history = History()
    changes.setdefault("custom_hooks", [dict(type="EMAHook", momentum=0.2), history, *hooks])
    evaluation = validation()
    runner = Runner(
        **training(
            folder,
            **{"model": dict(type=Net), **changes},
            **evaluation,
            test_dataloader=evaluation["val_dataloader"],
            test_cfg=dict(),
            test_evaluator=dict(type=Accuracy),
        )
    )
    runner.train()
    return runner, history


def test_validation_and_test_see_the_average_and_training_the_weights(tmp_path):
    runner, history = ema_run(tmp_path / "a")
    assert_close(average(history.steps[:5], 0.2), history.validated[0])
    assert_close(average(history.steps, 0.2), history.validated[1])
    plain = run(tmp_path / "b")
    assert_same(weights(plain), weights(runner))
    runner.test()
    assert_close(average(history.steps, 0.2), history.validated[2])
    assert_same(weights(plain), weights(runner))


def test_a_checkpoint_holds_both_and_alone_gives_the_average(tmp_path):
    _runner, history = ema_run(tmp_path)
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    assert_close(average(history.steps, 0.2), saved["state_dict"])
    for name, value in history.steps[-1].items():
        assert torch.equal(saved["ema_state_dict"][f"module.{name}"], value)
    other = Runner(**training(tmp_path / "b", load_from=tmp_path / "epoch_2.pth", **validation()))
    other.val()
    assert_same(weights(other), saved["state_dict"])


def test_batch_norm_statistics_are_the_models_own(tmp_path):
    _runner, history = ema_run(tmp_path, model=dict(type=Net, norm=True))
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)["state_dict"]
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(saved[name], history.steps[-1][name])


def test_averaging_starts_at_an_iteration(tmp_path):
    hook = dict(type="EMAHook", momentum=0.2, begin_iter=8)
    history = History()
    ema_run(tmp_path, custom_hooks=[hook, history])
    assert_same(history.validated[0], history.steps[4])  # none yet
    assert_close(average(history.steps[7:], 0.2), history.validated[1])
    first, second = (torch.load(tmp_path / f"epoch_{n}.pth", weights_only=True) for n in (1, 2))
    assert_same(first["state_dict"], history.steps[4])  # not the weights of the start
    assert_close(average(history.steps[7:], 0.2), second["state_dict"])


def test_averaging_starts_at_an_epoch(tmp_path):
    history = History()
    ema_run(tmp_path, custom_hooks=[dict(type="EMAHook", momentum=0.2, begin_epoch=2), history])
    assert_same(history.validated[0], history.steps[4])
    assert_close(average(history.steps[5:], 0.2), history.validated[1])


def test_an_epoch_to_begin_means_nothing_in_iterations(tmp_path):
    with pytest.raises(ConfigError, match=r"^custom_hooks\[0\]\.begin_epoch: .*begin_iter"):
        run(
            tmp_path,
            train_cfg=dict(by_epoch=False, max_iters=3),
            custom_hooks=[dict(type="EMAHook", begin_epoch=1)],
        )


def test_a_run_resumed_before_the_average_began_begins_it_in_time(tmp_path):
    hook = dict(type="EMAHook", momentum=0.2, begin_iter=8)
    whole = run(tmp_path / "a", custom_hooks=[hook])
    run(tmp_path / "b", train_cfg=dict(by_epoch=True, max_epochs=1), custom_hooks=[hook])
    parts = run(tmp_path / "b", custom_hooks=[hook], resume=True)
    one, other = (next(h for h in r.hooks if isinstance(h, EMAHook)).ema_model for r in (whole, parts))
    assert_same(one.state_dict(), other.state_dict())


def test_a_run_whose_checkpoint_has_no_average_starts_one(tmp_path):
    run(tmp_path, train_cfg=dict(by_epoch=True, max_epochs=1))
    _runner, history = ema_run(tmp_path, resume=True)
    assert len(history.steps) == 5
    assert_close(average(history.steps, 0.2), history.validated[-1])


def test_the_best_checkpoint_holds_the_average_too(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc", rule="greater"))
    runner, history = ema_run(tmp_path, default_hooks=hooks, train_dataloader=loader(batch_size=20))
    name = runner.message_hub.get_info("best_ckpt/acc")
    saved = torch.load(tmp_path / name, weights_only=True)
    epoch = saved["meta"]["epoch"]
    assert_close(average(history.steps[: 2 * epoch], 0.2), saved["state_dict"])
