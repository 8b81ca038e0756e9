"""Test that a resumed run ends with the same weights as an uninterrupted run."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.errors import CheckpointError
from slipstream.hooks import EMAHook, Hook
from slipstream.runner import Runner
from tiny_runs import (
    Losses,
    Net,
    Noisy,
    Scripted,
    Stop,
    StoppedError,
    assert_same,
    loader,
    run,
    scalars,
    training,
    validation,
    weights,
)


def test_a_configured_learning_rate_that_a_resumed_run_does_not_use_is_reported(tmp_path, capsys):
    def train(epochs, lr, **changes):
        optim_wrapper = dict(optimizer=dict(type="SGD", lr=lr))
        cfg = dict(by_epoch=True, max_epochs=epochs)
        return run(tmp_path, train_cfg=cfg, optim_wrapper=optim_wrapper, log_level="WARNING", **changes)

    train(1, 0.1)
    train(2, 0.1, resume=True)
    assert "is not used" not in capsys.readouterr().out
    resumed = train(3, 0.05, resume=True)
    message = "The configured learning rate 0.05 is not used: the resumed run continues with the checkpoint's"
    assert message in capsys.readouterr().out
    assert resumed.optim_wrapper.param_groups[0]["lr"] == 0.1


LOOPS = {
    "epochs": dict(sampler="DefaultSampler", train_cfg=dict(by_epoch=True, max_epochs=3)),
    "iterations": dict(
        sampler="DefaultSampler", train_cfg=dict(by_epoch=False, max_iters=15, val_interval=5)
    ),
    "endless": dict(sampler="InfiniteSampler", train_cfg=dict(by_epoch=False, max_iters=15, val_interval=5)),
}


def logs(work_dir):
    """Return the text of all log files of a run."""
    return "".join(path.read_text() for path in work_dir.glob("*/*.log"))


class DrawsInValidation(Hook):
    """A hook that draws random numbers during validation, like test-time dropout."""

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        torch.rand(3)


def full(work_dir, loop="epochs", by_epoch=False, stop=None, losses=None, workers=0, **changes):
    """Return a Runner with all the state that a resumed run must restore."""
    options = LOOPS[loop]
    last = dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater", factor=0.5, patience=0)
    default = dict(
        model=dict(type=Net, dropout=0.3, norm=True),
        train_dataloader=loader(Noisy(), sampler=options["sampler"], num_workers=workers),
        train_cfg=options["train_cfg"],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), clip_grad=dict(max_norm=1.0)),
        param_scheduler=[dict(type="LinearLR", start_factor=0.2, end=9, by_epoch=False), last],
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=1),
            checkpoint=dict(
                type="CheckpointHook", interval=1, by_epoch=by_epoch, save_best="acc", max_keep_ckpts=2
            ),
        ),
        custom_hooks=[dict(type="EMAHook", momentum=0.1), DrawsInValidation(), losses or Losses()],
        **validation(Scripted([0.5, 0.5, 0.4, 0.3])),
    )
    default["custom_hooks"] += [stop] if stop else []
    return Runner(**training(work_dir, **{**default, **changes}))


def average(runner):
    ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    return ema.ema_model.state_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the Runner and the losses of an uninterrupted run for each entry of `LOOPS`."""
    finished = {}
    for loop in LOOPS:
        losses = Losses()
        runner = full(tmp_path_factory.mktemp(loop), loop, losses=losses)
        runner.train()
        finished[loop] = runner, losses.by_iter
    return finished


def check_equal(whole, resumed, before, after):
    runner, losses = whole
    assert resumed.iter == runner.iter == 15
    assert before.by_iter.keys() | after.by_iter.keys() == losses.keys()
    assert_same(losses, {**before.by_iter, **after.by_iter})
    assert_same(weights(runner), weights(resumed))
    assert_same(average(runner), average(resumed))
    assert [g["lr"] for g in runner.optim_wrapper.param_groups] == [
        g["lr"] for g in resumed.optim_wrapper.param_groups
    ]
    shown = [(s["iter"], s["loss"], s["lr"]) for s in scalars(runner) if "loss" in s]
    again = [(s["iter"], s["loss"], s["lr"]) for s in scalars(resumed) if "loss" in s]
    assert again == shown[len(shown) - len(again) :]
    best = runner.message_hub.get_info("best_score/acc"), runner.message_hub.get_info("best_ckpt/acc")
    assert best == (
        resumed.message_hub.get_info("best_score/acc"),
        resumed.message_hub.get_info("best_ckpt/acc"),
    )


@pytest.mark.parametrize("iteration", [1, 3, 5, 9, 10, 14, 15])
@pytest.mark.parametrize("loop", LOOPS)
def test_run_resumed_after_any_step_is_bitwise_identical(whole, tmp_path, loop, iteration):
    before, after = Losses(), Losses()
    with pytest.raises(StoppedError):
        full(tmp_path, loop, stop=Stop(iteration), losses=before).train()
    values = [0.5, 0.5, 0.4][(iteration - 1) // 5 :]  # the validation after step `iteration` has not run
    resumed = full(tmp_path, loop, losses=after, resume=True, **validation(Scripted(values)))
    resumed.train()
    assert min(after.by_iter, default=16) == iteration + 1
    check_equal(whole[loop], resumed, before, after)


@pytest.mark.parametrize("stage", ["after_train_epoch", "after_val_iter"])
def test_run_stopped_before_validation_validates_on_resume(whole, tmp_path, stage):
    before, after = Losses(), Losses()
    with pytest.raises(StoppedError):
        full(tmp_path, by_epoch=True, stop=Stop(10, stage), losses=before).train()
    values = validation(Scripted([0.5, 0.4]))
    resumed = full(tmp_path, by_epoch=True, losses=after, resume=True, **values)
    resumed.train()
    assert min(after.by_iter) == 11
    runner, losses = whole["epochs"]
    assert_same(losses, {**before.by_iter, **after.by_iter})
    assert_same(weights(runner), weights(resumed))


class SaveAndStop(Hook):
    """A hook that saves a checkpoint at `stage` after `iteration` steps, and stops the run."""

    def __init__(self, iteration, stage):
        self.iteration = iteration
        setattr(self, stage, self.save)

    def save(self, runner, **_):
        if runner.iter == self.iteration:
            runner.save_checkpoint(runner.work_dir, "saved.pth", by_epoch=None)
            raise StoppedError


@pytest.mark.parametrize("stage", ["before_val", "after_val_iter"])
@pytest.mark.parametrize("loop", LOOPS)
def test_resume_repeats_the_validation_in_which_the_checkpoint_was_saved(whole, tmp_path, loop, stage):
    before, after = Losses(), Losses()
    with pytest.raises(StoppedError):
        full(tmp_path, loop, stop=SaveAndStop(10, stage), losses=before).train()
    values = validation(Scripted([0.5, 0.4]))
    resumed = full(tmp_path, loop, losses=after, resume=str(tmp_path / "saved.pth"), **values)
    resumed.train()
    check_equal(whole[loop], resumed, before, after)


def test_worker_count_does_not_change_results(whole, tmp_path):
    before, after = Losses(), Losses()
    with pytest.raises(StoppedError):
        full(tmp_path, stop=Stop(3), losses=before, workers=2).train()
    resumed = full(tmp_path, losses=after, resume=True)
    resumed.train()
    check_equal(whole["epochs"], resumed, before, after)


def test_resumed_run_deletes_older_checkpoints_and_replaces_the_best_one(tmp_path):
    with pytest.raises(StoppedError):
        full(tmp_path, by_epoch=True, stop=Stop(12)).train()
    assert {p.name for p in tmp_path.glob("*.pth")} == {"epoch_1.pth", "epoch_2.pth", "best_acc_epoch_1.pth"}
    full(tmp_path, by_epoch=True, resume=True, **validation(Scripted([0.5, 0.6]))).train()
    assert {p.name for p in tmp_path.glob("*.pth")} == {"epoch_2.pth", "epoch_3.pth", "best_acc_epoch_3.pth"}


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("wrapper", ["OptimWrapper", "AmpOptimWrapper"])
@pytest.mark.parametrize("iteration", [4, 5, 6])
def test_gradients_of_an_unfinished_accumulation_window_are_restored(tmp_path, iteration, wrapper, kind):
    changes = dict(
        optim_wrapper=dict(
            type=wrapper, optimizer=dict(type=kind, lr=0.1), accumulative_counts=4, clip_grad=dict(max_norm=1)
        ),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
    )
    one = run(tmp_path / "whole", **changes)
    with pytest.raises(StoppedError):
        run(tmp_path / "parts", **changes, custom_hooks=[Stop(iteration)])
    saved = torch.load(tmp_path / "parts" / f"iter_{iteration}.pth", weights_only=True)
    assert ("gradients" in saved) == (iteration != 4)
    assert_same(weights(one), weights(run(tmp_path / "parts", **changes, resume=True)))


@pytest.mark.parametrize("batch_size", [2, 4, 5, 16, 20, 64])
@pytest.mark.parametrize("loop", LOOPS)
def test_resume_with_a_different_batch_size_keeps_the_number_of_samples(tmp_path, loop, batch_size):
    seen = []

    class Watch(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append(data_batch[0])

    def cfg(size):
        return (
            LOOPS[loop]["train_cfg"]
            if loop == "epochs"
            else dict(by_epoch=False, max_iters=max(120 // size, 3))
        )

    stopping = dict(
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
        custom_hooks=[Watch(), Stop(6)],
    )
    sampler = LOOPS[loop]["sampler"]
    with pytest.raises(StoppedError):
        run(tmp_path, train_cfg=cfg(8), train_dataloader=loader(sampler=sampler), **stopping)
    before = torch.cat(seen)
    seen.clear()
    other = dict(train_cfg=cfg(batch_size), train_dataloader=loader(sampler=sampler, batch_size=batch_size))
    resumed = run(tmp_path, **other, custom_hooks=[Watch()], resume=True)
    stream = torch.cat([before, *seen])
    assert len(before) == 48
    passes = [stream[start : start + 40] for start in range(0, 80, 40)]  # each pass contains each sample once
    assert len({tuple(row.tolist()) for row in passes[0]}) == 40
    assert len({tuple(row.tolist()) for row in passes[1]}) == 40
    steps = 3 * -(-40 // batch_size) if loop == "epochs" else max(120 // batch_size, 3)
    assert resumed.iter == steps == resumed.max_iters


def test_resumed_run_keeps_the_seed(tmp_path):
    changes = dict(randomness=dict(seed=17), default_hooks=dict(checkpoint=dict(type="CheckpointHook")))
    run(tmp_path, **changes)
    given = dict(seed=None)
    resumed = Runner(**training(tmp_path, resume=True, randomness=given))
    assert resumed.seed == 17
    assert given == {"seed": None}
    seeds = {Runner(**training(tmp_path / str(i), randomness=None)).seed for i in range(3)}
    assert len(seeds) == 3
    assert 17 not in seeds


def test_two_runners_in_one_process_are_independent(tmp_path):
    one = Runner(**training(tmp_path / "a", model=dict(type=Net, dropout=0.5)))
    two = Runner(**training(tmp_path / "b", model=dict(type=Net, dropout=0.5), randomness=dict(seed=4)))
    two.train()
    torch.manual_seed(99)
    one.train()
    alone = run(tmp_path / "c", model=dict(type=Net, dropout=0.5))
    assert_same(weights(one), weights(alone))
    assert one.message_hub is not two.message_hub
    assert one.logger is not two.logger


class Stream(IterableDataset):
    """A stream that draws from the default generator, like the model's dropout."""

    def __len__(self):
        return 40

    def __iter__(self):
        return ((torch.randn(4), torch.tensor(i % 3)) for i in range(40))


def test_resume_restores_the_position_in_a_stream(tmp_path):
    def changes(losses, *hooks):
        return dict(
            model=dict(type=Net, dropout=0.3),
            train_dataloader=DataLoader(Stream(), batch_size=8),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
            custom_hooks=[losses, *hooks],
        )

    one, before, after = Losses(), Losses(), Losses()
    run(tmp_path / "a", **changes(one))
    with pytest.raises(StoppedError):
        run(tmp_path / "b", **changes(before, Stop(5)))
    resumed = run(tmp_path / "b", **changes(after), resume=True)
    assert resumed.iter == 10
    assert_same(one.by_iter, {**before.by_iter, **after.by_iter})


@pytest.mark.parametrize("key", ["optimizer", "param_schedulers"])
def test_error_for_a_checkpoint_without_training_state_names_the_key(tmp_path, key):
    option = {"optimizer": "save_optimizer", "param_schedulers": "save_param_scheduler"}[key]
    schedule = dict(param_scheduler=dict(type="StepLR", step_size=1))
    hooks = dict(checkpoint={"type": "CheckpointHook", "interval": 1, option: False})
    run(tmp_path, **schedule, default_hooks=hooks)
    with pytest.raises(CheckpointError, match=key):
        run(tmp_path, **schedule, resume=True)


@pytest.mark.parametrize(
    "schedule",
    [
        dict(type="CosineAnnealingLR", T_max=4, by_epoch=True),
        dict(type="CosineAnnealingLR", T_max=4, by_epoch=True, convert_to_iter_based=True),
        dict(type=torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    ],
    ids=["epochs", "iterations", "torch"],
)
def test_extended_run_with_a_schedule_equals_an_uninterrupted_one(tmp_path, schedule):
    """The scheduler's `end` is the length of the run, so it differs between the first run and the whole run."""

    def trained(folder, epochs, **changes):
        cfg = dict(by_epoch=True, max_epochs=epochs)
        return run(tmp_path / folder, train_cfg=cfg, param_scheduler=schedule, **changes)

    whole = trained("whole", 4)
    trained("parts", 2)
    assert_same(weights(trained("parts", 4, resume=True)), weights(whole))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (dict(type="PolyLR", eta_min=0.01), "(PolyLR)"),
        (dict(type="CosineAnnealingLR", eta_min=0.01, convert_to_iter_based=True), "(CosineAnnealingLR)"),
        (dict(type="PolyLR", end=4), None),
        (dict(type="CosineAnnealingLR", T_max=4), None),
        (dict(type="StepLR", step_size=1), None),
    ],
)
def test_resume_warns_if_a_schedule_depends_on_a_changed_length(tmp_path, schedule, expected):
    def trained(epochs, **changes):
        cfg = dict(by_epoch=True, max_epochs=epochs)
        return run(tmp_path, train_cfg=cfg, param_scheduler=schedule, **changes)

    trained(2)
    trained(2, resume=True)
    assert "do not start again" not in logs(tmp_path)
    trained(5, resume=True)
    text = logs(tmp_path)
    assert text.count("written by a run of 2 epochs, but this run has 5") == (expected is not None)
    if expected is not None:
        assert expected in text
        assert "load_from" in text


class Unfreezes(Hook):
    """Train the first layer and the BatchNorm from the second epoch on."""

    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            runner.model.first.requires_grad_(True)
            runner.model.norm.train()


def frozen(bias=True):
    torch.manual_seed(5)
    model = Net(norm=True)
    model.first.requires_grad_(False)
    model.first.bias.requires_grad_(bias)
    model.norm.eval()
    return model


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_run_trains_what_hooks_have_unfrozen(tmp_path, epochs, capsys):
    def train(folder, epochs, model=None, **changes):
        cfg = dict(by_epoch=True, max_epochs=epochs)
        hooks = dict(custom_hooks=[Unfreezes()])
        return run(
            tmp_path / folder, model=model or frozen(), train_cfg=cfg, **hooks, **validation(), **changes
        )

    whole = weights(train("whole", 3))
    assert whole["norm.num_batches_tracked"] == 10
    train("parts", epochs)
    assert_same(weights(train("parts", 3, resume=True)), whole)
    train("parts", 4, frozen(bias=False), resume=True, log_level="WARNING")
    assert "started with other frozen parameters" in capsys.readouterr().out


def test_resumed_run_continues_its_tensorboard_curves_in_one_folder(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def train(folder, **changes):
        runner = Runner(
            **training(
                tmp_path / folder,
                train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1),
                default_hooks=dict(
                    logger=dict(type="LoggerHook", interval=1),
                    checkpoint=dict(type="CheckpointHook", interval=1),
                ),
                visualizer=dict(type="Visualizer", vis_backends=[dict(type="TensorboardVisBackend")]),
                cfg=dict(note="writes an event before the run"),
                resume=True,
                **validation(),
                **changes,
            )
        )
        runner.train()

    def curves(folder):
        (run_folder,) = {path.parent for path in (tmp_path / folder).rglob("events.out.tfevents.*")}
        events = accumulator.EventAccumulator(str(run_folder))
        events.Reload()
        # The names of files from the same second end with a count, which TensorBoard does not sort as a number.
        return {tag: sorted((e.step, e.value) for e in events.Scalars(tag)) for tag in ("loss", "lr", "acc")}

    train("whole")
    # The checkpoints are from steps 5 and 10. The steps after them, and the first validation, are repeated.
    for stop in (Stop(8), Stop(12), Stop(10, "after_val_iter")):
        with pytest.raises(StoppedError):
            train("resumed", custom_hooks=[stop])
        assert [step for step, _ in curves("resumed")["loss"]] == list(range(1, stop.iteration + 1))
    train("resumed")
    assert curves("resumed") == curves("whole")
    assert [step for step, _ in curves("whole")["acc"]] == [1, 2, 3]
