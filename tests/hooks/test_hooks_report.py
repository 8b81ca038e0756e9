"""Tests of the report that a run writes when it ends."""

import json
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream import hooks
from slipstream.errors import DataError, NonFiniteLossError
from slipstream.evaluator import IoUMetric
from slipstream.hooks import Hook, run_report
from slipstream.preemption import Preempted
from slipstream.report import read_run
from slipstream.report.advice import mean_speed
from slipstream.runner import Runner
from slipstream.step import CompiledStep
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
    assert made.samples_per_step == 8
    loss = made.curves["train/loss"]
    history, _ = runner.message_hub.get_scalar("train/loss").data
    assert sum(loss.count) == 20
    assert sum(n * m for n, m in zip(loss.count, loss.mean, strict=True)) == pytest.approx(
        history.sum(), rel=1e-5
    )
    assert loss.x[-1] == 20
    assert made.curves["val/acc"].x == [5, 10, 15, 20]
    assert made.curves["val/acc"].last() == pytest.approx(runner.message_hub.get_scalar("val/acc").current())
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


def test_iteration_based_run_without_log_lines_records_its_losses(tmp_path):
    runner = run(tmp_path, train_cfg=dict(by_epoch=False, max_iters=3), default_hooks=dict(checkpoint=None))
    made = report(runner)
    assert made.curves["train/loss"].x == [3]
    assert made.curves["train/loss"].count == [3]
    losses = runner.message_hub.get_scalar("train/loss")
    assert made.curves["train/loss"].last() == pytest.approx(losses.current(), rel=1e-6)
    assert len(set(losses.newest(3))) == 3  # otherwise, the first loss would also equal the last one
    assert (made.max_epochs, made.iteration) == (0, 3)
    assert "val/acc" not in made.curves


def test_single_step_is_only_a_first_step(tmp_path):
    made = report(run(tmp_path, train_cfg=dict(by_epoch=False, max_iters=1)))
    assert made.phases.steps == 1
    assert made.phases.first["forward"] > 0
    assert "forward" not in made.phases.seconds
    assert made.status == "finished"


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
    assert sum(made.curves["train/loss"].bad) == 7
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
    assert made.curves["val/acc"].newest == [0.1, 0.9, 0.5]
    assert max(made.curves["speed/images_per_second"].x) == 15 > 10 >= report(first).iteration
    assert min(made.curves["speed/images_per_second"].x) > 10
    other = train(
        3, [0.1, 0.4, 0.5], resume=str(tmp_path / "epoch_1.pth")
    )  # the first report continues to epoch 2
    assert report(other).curves["val/acc"].newest == [0.1, 0.4, 0.5]


def test_report_of_a_resumed_run_keeps_an_evaluation_that_is_not_repeated(tmp_path):
    def train(epochs, values, **changes):
        evaluation = validation([dict(type=Scripted, values=values, name="acc")])
        cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=2)
        return Runner(**training(tmp_path, train_cfg=cfg, **evaluation, **changes))

    train(3, [0.1, 0.9]).train()  # evaluates after epoch 2 and, at its end, after epoch 3
    resumed = train(5, [0.7, 0.3, 0.4], resume=True)
    resumed.val()
    resumed.train()
    made = report(resumed)
    assert made.curves["val/acc"].x == [10, 15, 20, 25]
    assert made.curves["val/acc"].newest == [0.1, 0.9, 0.3, 0.4]


def test_report_of_a_resumed_run_without_an_earlier_report_starts_at_the_checkpoint(tmp_path):
    first = run(tmp_path)
    shutil.rmtree(first.log_dir)
    made = report(run(tmp_path, train_cfg=dict(by_epoch=True, max_epochs=3), resume=True))
    assert min(made.curves["train/loss"].x) > 10


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


def test_validation_without_training_has_a_report(tmp_path):
    runner = Runner(model=Net(), work_dir=tmp_path, log_level="ERROR", **validation())
    metrics = runner.val()
    made = report(runner)
    assert made.curves["val/acc"].last() == pytest.approx(metrics["acc"], rel=1e-6)
    assert (made.status, made.phases.steps, made.iteration) == ("finished", 0, 0)


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


def test_hook_can_be_removed(tmp_path):
    runner = run(tmp_path, default_hooks=dict(report=None, timer=None))
    assert not list(Path(runner.log_dir).glob("report.*"))
    assert not runner.phases.seconds  # nothing reads the clock


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.hooks.run_report.is_main_process", lambda: False)
    runner = run(tmp_path, **validation())
    assert not list(Path(runner.log_dir).glob("report.*"))


def test_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.hooks.run_report.write_report", full)
    runner = run(tmp_path)
    log = next(Path(runner.log_dir).glob("*.log")).read_text(encoding="utf-8")
    assert "The report cannot be written: OSError: [Errno 28] No space left on device" in log


@pytest.mark.parametrize(
    ("batches", "text"), [(3, "one compiled graph"), (0, "eager, because compilation did")]
)
def test_a_graph_that_no_batch_used_is_reported_as_eager(batches, text):
    step = Mock(spec=CompiledStep, uses_graph=True, batches=batches)
    assert run_report._describe_step(Mock(step=step)).startswith(text)


def test_hook_adds_no_work_to_steps():
    assert hooks.ReportHook().method_at("after_train_iter") is None
    assert hooks.ReportHook().method_at("before_train_iter") is None


def test_step_of_a_model_with_its_own_train_step_is_not_split(tmp_path):
    class Own(Net):
        def train_step(self, data, optim_wrapper):
            losses = self(*data, mode="loss")
            optim_wrapper.update_params(losses["loss"])
            return losses

    made = report(run(tmp_path, model=Own()))
    assert made.step == "the model's train_step"
    assert made.phases.seconds["optimizer"] > 0
    assert made.phases.seconds["step"] > 0
    assert "forward" not in made.phases.seconds


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


def test_damaged_report_raises_an_error_with_a_remedy(tmp_path):
    runner = run(tmp_path)
    path = Path(runner.log_dir) / "report.json"
    path.write_text(path.read_text(encoding="utf-8")[:-100], encoding="utf-8")
    with pytest.raises(DataError, match=r"Delete .*report\.json to rebuild"):
        report(runner)


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
    assert mean_speed(made) == pytest.approx(1.0)
    assert runner.message_hub.get_info("images_per_second") == pytest.approx(1.0)


def test_classification_has_a_confusion_matrix(tmp_path):
    made = report(run(tmp_path, **validation(dict(type="Accuracy", num_classes=3))))
    (confusion,) = made.confusions
    assert (confusion.metric, confusion.mode, confusion.iteration) == ("accuracy Accuracy", "val", 10)
    assert [sum(row) for row in confusion.matrix] == samples()[1].bincount(minlength=3).tolist()
    hits = sum(confusion.matrix[index][index] for index in range(3))
    assert made.curves["val/accuracy/top1"].last() == pytest.approx(100 * hits / 40)


@pytest.mark.parametrize("fused", [True, False])
def test_report_contains_the_settings_that_the_run_used(tmp_path, fused):
    optim = dict(optimizer=dict(type="SGD", lr=0.1, fused=fused))
    checkpoint = dict(type="CheckpointHook", async_save=fused)
    runner = run(tmp_path, optim_wrapper=optim, default_hooks=dict(checkpoint=checkpoint))
    made = report(runner)
    assert made.settings["fused"] is fused
    assert made.settings["async_save"] is fused


@pytest.mark.parametrize("value", [lambda: 1, torch.ones(2, 2).numpy(), [[0.5]]])
def test_another_attribute_named_confusion_does_not_fail_the_run(value, tmp_path):
    class Own(IoUMetric):
        confusion = property(lambda metric: value, lambda metric, counts: None)

    runner = run(tmp_path, model=Pixels(), **validation([dict(type=Own, num_classes=3)]))
    assert report(runner).confusions == []
