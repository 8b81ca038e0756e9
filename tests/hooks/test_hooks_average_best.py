"""The mean of the weights of the best epochs: which they are, what it is, and that it outlives a kill."""

from pathlib import Path

import pytest
import torch
from ema_runs import SCHEDULED, History, average_of

from slipstream.errors import ConfigError
from slipstream.hooks import Hook
from slipstream.runner import Runner
from tiny_runs import (
    LOCAL,
    Accuracy,
    Net,
    Scripted,
    assert_same,
    loader,
    run,
    scalars,
    training,
    validation,
    weights,
)

NORM = dict(type=Net, norm=True)


class Snapshots(Hook):
    """Counts how often each snapshot is written, by the time of its last change."""

    priority = "LOWEST"

    def __init__(self):
        self.written = {}

    def after_val_epoch(self, runner, metrics=None):
        for path in snapshots(runner.work_dir):
            self.written.setdefault(path.name, set()).add(path.stat().st_mtime_ns)


class Stop(Hook):
    """Ends the training after an epoch: cleanly, or as a kill would."""

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
    """Train for as many epochs as there are values, the last of them for the mean; return Runner and history."""
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
    """In double precision; what is no floating point is the first's."""
    first = states[0]
    return {
        name: sum(state[name].double() for state in states).div(len(states)).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


def written(folder, name="average_model.pth"):
    return torch.load(folder / name, weights_only=True)


def test_it_is_the_mean_of_the_weights_of_the_best_epochs(tmp_path):
    runner, history = averaged(tmp_path, [0.1, 0.7, 0.5, 0.9, 0.2, 0.4])
    best = [history.validated[epoch - 1] for epoch in (4, 2, 3)]
    found = written(tmp_path)
    assert found["meta"]["averaged"] == ["epoch_4.pth", "epoch_2.pth", "epoch_3.pth"]
    assert_same(found["state_dict"], mean(best))
    assert found["state_dict"]["norm.num_batches_tracked"] == 8, "as in the best epoch"
    assert [path.name for path in snapshots(tmp_path)] == ["epoch_2.pth", "epoch_3.pth", "epoch_4.pth"]
    assert_same(weights(runner), history.steps[-1])


def test_the_mean_is_validated_once_and_logged_and_nothing_else_takes_it_for_an_epoch(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc"))
    runner, history = averaged(tmp_path, [0.5, 0.4, 0.99], default_hooks=hooks)
    assert len(history.validated) == 3
    assert_same(history.validated[2], written(tmp_path)["state_dict"])
    assert runner.message_hub.get_scalar("average_model/acc").current() == 0.99
    assert [line["average_model/acc"] for line in scalars(runner) if "average_model/acc" in line] == [0.99]
    assert runner.message_hub.get_info("best_score/acc") == 0.5
    assert runner.model.training


def test_a_loss_is_the_better_the_less_it_is_and_the_earlier_of_equals_stays(tmp_path):
    averaged(tmp_path / "a", [0.4, 0.1, 0.1, 0.2, 0.0], count=1, name="loss")
    assert written(tmp_path / "a")["meta"]["averaged"] == ["epoch_2.pth"]
    averaged(tmp_path / "b", [0.4, 0.1, 0.3, 0.0], count=2, name="loss", rule="greater", filename="mean.pth")
    assert written(tmp_path / "b", "mean.pth")["meta"]["averaged"] == ["epoch_1.pth", "epoch_3.pth"]


def test_an_epoch_whose_metric_is_not_finite_is_none_of_them(tmp_path):
    averaged(tmp_path, [float("nan"), 0.2, float("inf"), 0.1, 0.0])
    assert written(tmp_path)["meta"]["averaged"] == ["epoch_2.pth", "epoch_4.pth"]


def test_a_snapshot_is_written_once_and_not_again(tmp_path):
    watching = Snapshots()
    averaged(tmp_path, [0.1, 0.7, 0.5, 0.9, 0.2, 0.4], hooks=[watching])
    assert sorted(watching.written) == ["epoch_1.pth", "epoch_2.pth", "epoch_3.pth", "epoch_4.pth"]
    assert all(len(times) == 1 for times in watching.written.values())


@pytest.mark.parametrize(
    "hook", [dict(type="EMAHook", momentum=0.3), dict(SCHEDULED, decay=0.7, decay_type="constant")]
)
def test_of_a_run_with_an_average_the_validated_weights_are_averaged(tmp_path, hook):
    runner, history = averaged(tmp_path / "a", [0.1, 0.7, 0.5, 0.9, 0.0], count=2, hooks=[hook])
    expected = mean([history.validated[3], history.validated[1]])
    assert_same(written(tmp_path / "a")["state_dict"], expected)
    assert_same(history.validated[4], expected)
    assert_same(weights(runner), history.steps[-1])
    assert_same(average_of(runner).module.state_dict(), history.validated[3])
    assert not torch.equal(history.validated[3]["first.weight"], history.steps[-1]["first.weight"])


def test_a_training_that_a_hook_ends_early_has_its_mean_too(tmp_path):
    averaged(tmp_path, [0.3, 0.6, 0.0], hooks=[Stop(2)], epochs=5)
    assert written(tmp_path)["meta"]["averaged"] == ["epoch_2.pth", "epoch_1.pth"]


def test_in_a_training_by_iterations_it_is_the_mean_of_the_best_validations(tmp_path):
    cfg = dict(by_epoch=False, max_iters=6, val_interval=2)
    _, history = averaged(tmp_path, [0.1, 0.5, 0.4, 0.0], count=2, train_cfg=cfg)
    assert written(tmp_path)["meta"]["averaged"] == ["iter_4.pth", "iter_6.pth"]
    assert_same(written(tmp_path)["state_dict"], mean(history.validated[1:3]))


@pytest.mark.parametrize("epoch", [1, 2, 3, 4])
def test_a_killed_and_resumed_run_averages_what_one_that_went_through_does(tmp_path, epoch):
    values = [0.1, 0.7, 0.5, 0.9, 0.2]
    averaged(tmp_path / "a", [*values, 0.0])
    with pytest.raises(KeyboardInterrupt):
        averaged(tmp_path / "b", values, hooks=[Stop(epoch, kill=True)], epochs=5)
    # The last validation had not been saved, so it comes again.
    averaged(tmp_path / "b", [*values[epoch - 1 :], 0.0], epochs=5, resume=True)
    one, other = written(tmp_path / "a"), written(tmp_path / "b")
    assert (
        one["meta"]["averaged"] == other["meta"]["averaged"] == ["epoch_4.pth", "epoch_2.pth", "epoch_3.pth"]
    )
    assert_same(one["state_dict"], other["state_dict"])
    assert len(snapshots(tmp_path / "b")) == 3


def test_a_longer_training_goes_on_with_the_best_of_the_shorter(tmp_path):
    averaged(tmp_path, [0.8, 0.7, 0.0], count=2)
    averaged(tmp_path, [0.7, 0.75, 0.1, 0.0], count=2, epochs=4, resume=True)
    assert written(tmp_path)["meta"]["averaged"] == ["epoch_1.pth", "epoch_3.pth"]


def test_a_snapshot_that_is_gone_is_named_and_not_averaged(tmp_path, capsys):
    averaged(tmp_path, [0.8, 0.7, 0.0], log_level="WARNING")
    (tmp_path / "average_best" / "epoch_1.pth").unlink()
    averaged(tmp_path, [0.7, 0.1, 0.0], epochs=3, resume=True, log_level="WARNING")
    assert "epoch_1.pth is gone" in "".join(capsys.readouterr())
    assert written(tmp_path)["meta"]["averaged"] == ["epoch_2.pth", "epoch_3.pth"]


def test_the_file_is_one_to_start_from(tmp_path):
    averaged(tmp_path / "a", [0.8, 0.7, 0.0])
    source = tmp_path / "a" / "average_model.pth"
    runner = Runner(
        **training(tmp_path / "b", model=NORM, load_from=source, visualizer=LOCAL, **validation())
    )
    runner.val()
    assert_same(weights(runner), written(tmp_path / "a")["state_dict"])


# ---- bad input ----------------------------------------------------------------------------------------


def test_without_a_validated_epoch_there_is_no_mean_and_a_warning(tmp_path, capsys):
    hook = dict(type="AverageBestHook", metric="acc")
    run(tmp_path, custom_hooks=[hook], log_level="WARNING")
    assert "no validation gave 'acc'" in "".join(capsys.readouterr())
    assert not (tmp_path / "average_model.pth").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(metric="score"), r"^custom_hooks\[0\]\.rule: .*'score' does not tell"),
        (dict(metric="acc", rule="more"), r"^custom_hooks\[0\]\.rule: must be 'greater' or 'less'"),
        (dict(metric="acc", count=0), r"^custom_hooks\[0\]\.count: must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        Runner(**training(tmp_path, custom_hooks=[dict(type="AverageBestHook", **options)]))


def test_an_unknown_metric_names_the_nearest(tmp_path):
    hook = dict(type="AverageBestHook", metric="accu")
    with pytest.raises(ConfigError, match=r"^custom_hooks\[0\]\.metric: .*did you mean 'acc'"):
        run(tmp_path, custom_hooks=[hook], **validation(dict(type=Accuracy)))
