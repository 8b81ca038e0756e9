"""Tests of the report that a run writes when it ends."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.errors import NonFiniteLossError
from slipstream.evaluator import IoUMetric
from slipstream.hooks import Hook
from slipstream.preemption import Preempted
from slipstream.report import read_run
from slipstream.runner import Runner
from slipstream.training import Trainer
from tiny_runs import LOCAL, Net, Scripted, loader, run, samples, training, validation


def report(runner):
    return read_run(Path(runner.log_dir))


class At(Hook):
    """A hook that calls a function after a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.step:
            self.call()


def test_finished_run_records_curves_times_and_settings(tmp_path):
    runner = run(tmp_path, **validation(), train_cfg=dict(by_epoch=True, max_epochs=4))
    made = report(runner)
    assert (made.status, made.error, made.source) == ("finished", "", "run")
    assert (made.iteration, made.max_iterations, made.epoch, made.max_epochs) == (20, 20, 4, 4)
    assert made.name == runner.experiment_name
    loss = made.curves["train/loss"]
    history, _ = runner.message_hub.get_scalar("train/loss").data
    assert sum(loss.count) == 20
    assert sum(n * m for n, m in zip(loss.count, loss.mean, strict=True)) == pytest.approx(
        history.sum(), rel=1e-5
    )
    assert loss.x[-1] == 20
    assert made.curves["val/acc"].x == [5, 10, 15, 20]
    assert made.curves["val/acc"].newest == pytest.approx(runner.message_hub.get_scalar("val/acc").current())
    assert set(made.curves["train/lr"].mean) == {0.1}
    assert made.config["optim_wrapper.optimizer.lr"] == 0.1
    assert made.settings["num_workers"] == 0
    assert made.step == "eager"
    assert made.environment["torch"] == torch.__version__
    assert made.environment["seed"] == "3"
    assert made.messages == []
    assert (Path(runner.log_dir) / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_phases_add_up_to_the_duration_and_contain_each_part(tmp_path):
    made = report(run(tmp_path, **validation()))
    phases = made.phases
    assert phases.steps == 10
    assert sum(phases.seconds.values()) + sum(phases.first.values()) == pytest.approx(made.seconds, abs=1e-4)
    for phase in ("data", "preprocess", "forward", "backward", "optimizer", "hooks", "logging"):
        assert phases.seconds[phase] > 0
        assert phases.first[phase] > 0
    assert phases.seconds["validation"] > 0
    assert phases.seconds["checkpoint"] > 0


def test_failed_run_has_a_report_with_its_error_and_its_last_loss(tmp_path):
    class Diverging(Net):
        steps = 0

        def forward(self, inputs, targets, mode):
            self.steps += 1
            losses = super().forward(inputs, targets, mode)
            return {"loss": losses["loss"] * (float("nan") if self.steps >= 4 else 1)}

    runner = Runner(**training(tmp_path, model=Diverging(), train_cfg=dict(by_epoch=False, max_iters=30)))
    with pytest.raises(NonFiniteLossError):
        runner.train()
    made = report(runner)
    assert made.status == "failed"
    assert "'loss' became nan at iteration 4" in made.error
    assert made.curves["train/loss"].bad == 7
    assert sum(made.curves["train/loss"].count) == 3
    assert "failed" in (Path(runner.log_dir) / "report.html").read_text(encoding="utf-8")


def test_interrupted_run_has_a_report(tmp_path):
    stop = At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    runner = Runner(**training(tmp_path, custom_hooks=[stop]))
    with pytest.raises(Preempted):
        runner.train()
    assert report(runner).status == "interrupted"
    saved = torch.load(tmp_path / "preempted.pth", weights_only=False)["meta"]["iter"]
    assert report(runner).iteration == saved >= 4
    log = next(Path(runner.log_dir).glob("*.log")).read_text(encoding="utf-8")
    assert f"the state after iteration {saved} was saved" in log


def test_report_of_a_resumed_run_continues_the_curves(tmp_path):
    def train(epochs, values, **changes):
        evaluation = validation([dict(type=Scripted, values=values, name="acc")])
        hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=-1))
        changes |= dict(train_cfg=dict(by_epoch=True, max_epochs=epochs), default_hooks=hooks)
        return run(tmp_path, **evaluation, **changes)

    first = train(2, [0.1, 0.9])
    second = train(3, [0.9, 0.5], resume=True)  # repeats the validation after epoch 2
    assert first.log_dir != second.log_dir
    made = report(second)
    assert (made.start_iteration, made.iteration, made.phases.steps) == (10, 15, 5)
    assert made.resumed_from == "epoch_2.pth"
    assert sum(made.curves["train/loss"].count) == 15
    assert made.curves["val/acc"].x == [5, 10, 15]
    assert made.curves["val/acc"].mean == [0.1, 0.9, 0.5]
    assert max(made.curves["speed/images_per_second"].x) == 15 > 10 >= report(first).iteration
    assert min(made.curves["speed/images_per_second"].x) > 10
    other = train(
        3, [0.1, 0.4, 0.5], resume=str(tmp_path / "epoch_1.pth")
    )  # the first report continues to epoch 2
    assert report(other).curves["val/acc"].mean == [0.1, 0.4, 0.5]


def test_results_of_a_later_test_are_added_to_the_training_report(tmp_path):
    evaluation = validation()
    tests = {name.replace("val", "test", 1): value for name, value in evaluation.items()}
    runner = run(tmp_path, **tests)
    assert "test/acc" not in report(runner).curves
    metrics = runner.test()
    made = report(runner)
    assert made.curves["test/acc"].mean == [pytest.approx(metrics["acc"], rel=1e-6)]
    assert made.curves["test/acc"].x == [10]
    assert made.phases.seconds["test"] > 0
    assert made.iteration == 10


class Pixels(Net):
    """A network whose predictions are the targets, except that class 1 is predicted as class 2."""

    def forward(self, inputs, targets, mode):
        if mode == "loss":
            return super().forward(inputs, targets, mode)
        masks = targets[:, None, None].expand(-1, 2, 2)
        return {"preds": torch.where(masks == 1, 2, masks), "targets": masks}


def test_confusion_matrix_of_the_last_validation_is_recorded_once(tmp_path):
    metrics = [dict(type=IoUMetric, num_classes=3), dict(type=IoUMetric, num_classes=3, prefix="again")]
    runner = run(tmp_path, model=Pixels(), **validation(metrics))
    (confusion,) = report(runner).confusions
    counts = torch.bincount(samples()[1], minlength=3) * 4
    assert confusion.matrix == [[int(counts[0]), 0, 0], [0, 0, int(counts[1])], [0, 0, int(counts[2])]]
    assert (confusion.mode, confusion.iteration, confusion.classes) == ("val", 10, ["0", "1", "2"])


def test_warnings_and_options_of_the_run_are_recorded(tmp_path):
    class Warns(Hook):
        def before_train(self, runner):
            runner.logger.warning("first line\nsecond line of <b>user</b> code")

    runner = run(tmp_path, custom_hooks=[Warns()], speed=dict(accumulate=2))
    made = report(runner)
    assert [message.text for message in made.messages] == ["first line\nsecond line of <b>user</b> code"]
    assert [(row.option, row.value, row.source) for row in made.options] == [
        ("accumulate", "2", "speed.accumulate")
    ]
    page = (Path(runner.log_dir) / "report.html").read_text(encoding="utf-8")
    assert "second line of &lt;b&gt;user&lt;/b&gt; code" in page
    assert "<b>user" not in page


def test_secrets_are_not_in_the_report(tmp_path):
    hook = dict(type=At, step=99, call=dict(api_key="s3cr3t-value-123"))
    runner = Runner(**training(tmp_path, custom_hooks=[hook]))
    runner.train()
    text = (Path(runner.log_dir) / "report.json").read_text(encoding="utf-8")
    assert "s3cr3t" not in text
    assert json.loads(text)["config"]["custom_hooks.0.call.api_key"] == "<redacted>"


def test_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.report.write_report", full)
    runner = run(tmp_path)
    log = next(Path(runner.log_dir).glob("*.log")).read_text(encoding="utf-8")
    assert "The report cannot be written: OSError: [Errno 28] No space left on device" in log


def test_graph_is_reported_as_one_phase(tmp_path):
    made = report(run(tmp_path, speed=dict(compile=dict(backend="eager", scope="step")), visualizer=LOCAL))
    assert made.step == "one compiled graph"
    assert made.phases.seconds["step"] > made.phases.seconds.get("optimizer", 0.0)


def test_trainer_writes_a_report(tmp_path):
    inputs, targets = samples()
    data = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    trainer = Trainer("mine", ckpt_root_dir=tmp_path)
    params = dict(max_epochs=2, initial_lr=0.1, loss="CrossEntropyLoss", optimizer="SGD", lr_mode="CosineLRScheduler",
                  valid_metrics_list=["Accuracy"], metric_to_watch="Accuracy")  # fmt: skip
    trainer.train(nn.Linear(4, 3), params, data, data)
    made = report(trainer.runner)
    assert made.status == "finished"
    assert made.name.startswith("mine")
    assert made.curves["val/Accuracy"].x == [5, 10]
    assert made.curves["val/Accuracy (second evaluation)"].x == [
        10
    ]  # evaluates the average of the best checkpoints


def test_images_per_second_count_the_samples_of_a_smaller_last_batch(tmp_path, monkeypatch):
    """The simulated clock advances only in training steps, by one second per sample. The correct speed is 1 image/s."""
    now = [0.0]
    for module in ("logging.phases", "hooks.timing"):
        monkeypatch.setattr(f"slipstream.{module}.perf_counter", lambda: now[0])

    class Slow(Net):
        def forward(self, inputs, targets, mode):
            now[0] += len(inputs)
            return super().forward(inputs, targets, mode)

    runner = run(
        tmp_path,
        model=Slow(),
        train_dataloader=loader(TensorDataset(*samples(19))),  # 8, 8 and 3 samples
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
    )
    made = report(runner)
    assert made.phases.samples == 19 + 11  # without the first step
    assert set(made.curves["speed/images_per_second"].mean) == {1.0}
    assert made.images_per_second == pytest.approx(1.0)
    assert runner.message_hub.get_info("images_per_second") == pytest.approx(1.0)


@pytest.mark.parametrize("fused", [True, False])
def test_report_contains_the_settings_that_the_run_used(tmp_path, fused):
    optim = dict(optimizer=dict(type="SGD", lr=0.1, fused=fused))
    checkpoint = dict(type="CheckpointHook", async_save=fused)
    runner = run(tmp_path, optim_wrapper=optim, default_hooks=dict(checkpoint=checkpoint))
    made = report(runner)
    assert made.settings["fused"] is fused
    assert made.settings["async_save"] is fused
