"""AverageBestHook: selection of the best epochs, their mean weights, and resuming after an interruption."""

from pathlib import Path

import pytest
import torch
from ema_runs import SCHEDULED, History, average_of

from slipstream.hooks import Hook
from slipstream.runner import Runner
from tiny_runs import (
    LOCAL,
    Net,
    Scripted,
    assert_same,
    loader,
    scalars,
    training,
    validation,
    weights,
)

NORM = dict(type=Net, norm=True)


class Stop(Hook):
    """A hook that ends training after an epoch, either cleanly or with an exception."""

    priority = "LOWEST"

    def __init__(self, epoch, kill=False):
        self.epoch, self.kill = epoch, kill

    def after_val_epoch(self, runner, metrics=None):
        if runner.is_training and runner.epoch == self.epoch:
            if self.kill:
                raise KeyboardInterrupt
            runner.train_loop.stop_training = True


def snapshots(folder):
    return sorted((Path(folder) / "average_best").glob("*.pth"))


def averaged(folder, values, count=3, hooks=(), name="acc", epochs=None, **changes):
    """Train for one epoch per value except the last, which is the metric of the average.

    Return the Runner and the `History` hook.
    """
    options = {key: changes.pop(key) for key in ("rule", "filename") if key in changes}
    hook = dict(type="AverageBestHook", metric=name, count=count, **options)
    history = History()
    arguments = {
        "model": NORM,
        "train_cfg": dict(by_epoch=True, max_epochs=epochs or len(values) - 1),
        "train_dataloader": loader(batch_size=20),
        **validation(Scripted(values, name)),
        **changes,
    }
    runner = Runner(**training(folder, custom_hooks=[hook, history, *hooks], **arguments))
    runner.train()
    return runner, history


def mean(states):
    """Return the mean, computed in double precision. Integer tensors are copied from the first state."""
    first = states[0]
    return {
        name: sum(state[name].double() for state in states).div(len(states)).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


def written(folder, name="average_model.pth"):
    return torch.load(folder / name, weights_only=True)


def test_average_is_the_mean_of_the_best_epochs_weights(tmp_path):
    runner, history = averaged(tmp_path, [0.1, 0.7, 0.5, 0.9, 0.2, 0.4])
    best = [history.validated[epoch - 1] for epoch in (4, 2, 3)]
    found = written(tmp_path)
    assert found["meta"]["averaged"] == ["epoch_4.pth", "epoch_2.pth", "epoch_3.pth"]
    assert_same(found["state_dict"], mean(best))
    assert found["state_dict"]["norm.num_batches_tracked"] == 8, "not the count of the best epoch"
    assert [path.name for path in snapshots(tmp_path)] == ["epoch_2.pth", "epoch_3.pth", "epoch_4.pth"]
    assert_same(weights(runner), history.steps[-1])


def test_average_is_validated_once_and_not_counted_as_an_epoch(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc"))
    runner, history = averaged(tmp_path, [0.5, 0.4, 0.99], default_hooks=hooks)
    assert len(history.validated) == 3
    assert_same(history.validated[2], written(tmp_path)["state_dict"])
    assert runner.message_hub.get_scalar("average_model/acc").current() == 0.99
    assert [line["average_model/acc"] for line in scalars(runner) if "average_model/acc" in line] == [0.99]
    assert runner.message_hub.get_info("best_score/acc") == 0.5
    assert runner.model.training


def test_lower_loss_is_better_and_the_first_of_equal_epochs_is_kept(tmp_path):
    averaged(tmp_path / "a", [0.4, 0.1, 0.1, 0.2, 0.0], count=1, name="loss")
    assert written(tmp_path / "a")["meta"]["averaged"] == ["epoch_2.pth"]
    averaged(tmp_path / "b", [0.4, 0.1, 0.3, 0.0], count=2, name="loss", rule="greater", filename="mean.pth")
    assert written(tmp_path / "b", "mean.pth")["meta"]["averaged"] == ["epoch_1.pth", "epoch_3.pth"]


def test_epoch_with_non_finite_metric_is_not_averaged(tmp_path):
    averaged(tmp_path, [float("nan"), 0.2, float("inf"), 0.1, 0.0])
    assert written(tmp_path)["meta"]["averaged"] == ["epoch_2.pth", "epoch_4.pth"]


@pytest.mark.parametrize(
    "hook", [dict(type="EMAHook", momentum=0.3), dict(SCHEDULED, decay=0.7, decay_type="constant")]
)
def test_ema_weights_are_averaged_with_an_ema_hook(tmp_path, hook):
    runner, history = averaged(tmp_path / "a", [0.1, 0.7, 0.5, 0.9, 0.0], count=2, hooks=[hook])
    expected = mean([history.validated[3], history.validated[1]])
    assert_same(written(tmp_path / "a")["state_dict"], expected)
    assert_same(history.validated[4], expected)
    assert_same(weights(runner), history.steps[-1])
    assert_same(average_of(runner).module.state_dict(), history.validated[3])
    assert not torch.equal(history.validated[3]["first.weight"], history.steps[-1]["first.weight"])


@pytest.mark.parametrize("epoch", [2, 4])
def test_resumed_run_averages_the_same_epochs(tmp_path, epoch):
    values = [0.1, 0.7, 0.5, 0.9, 0.2]
    averaged(tmp_path / "a", [*values, 0.0])
    with pytest.raises(KeyboardInterrupt):
        averaged(tmp_path / "b", values, hooks=[Stop(epoch, kill=True)], epochs=5)
    # The last validation was not saved, so it runs again.
    averaged(tmp_path / "b", [*values[epoch - 1 :], 0.0], epochs=5, resume=True)
    one, other = written(tmp_path / "a"), written(tmp_path / "b")
    assert (
        one["meta"]["averaged"] == other["meta"]["averaged"] == ["epoch_4.pth", "epoch_2.pth", "epoch_3.pth"]
    )
    assert_same(one["state_dict"], other["state_dict"])
    assert len(snapshots(tmp_path / "b")) == 3


def test_average_file_works_with_load_from(tmp_path):
    averaged(tmp_path / "a", [0.8, 0.7, 0.0])
    source = tmp_path / "a" / "average_model.pth"
    runner = Runner(
        **training(tmp_path / "b", model=NORM, load_from=source, visualizer=LOCAL, **validation())
    )
    runner.val()
    assert_same(weights(runner), written(tmp_path / "a")["state_dict"])
