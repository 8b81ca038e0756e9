"""Tests of phase callbacks: events, context attributes, and errors for unavailable attributes."""

from types import SimpleNamespace

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.registry import HOOKS
from slipstream.training.callbacks import (
    Callback,
    Phase,
    PhaseCallback,
    SGLogger,
    callback_hooks,
)
from slipstream.visualization import Visualizer
from tiny_runs import Net, Scripted, assert_same, loader, run, validation, weights

EVENTS = [name for name in dir(Callback) if name.startswith("on_")]


class Recording(Callback):
    """A callback that records each event with the result of `look(context)`."""

    def __init__(self, look=lambda context: None):
        self.look, self.seen = look, []


def _note(event):
    return lambda self, context: self.seen.append((event, self.look(context)))


for _event in EVENTS:
    setattr(Recording, _event, _note(_event))


class At(PhaseCallback):
    """A callback that records the result of `look(context)` at one phase."""

    def __init__(self, phase, look):
        super().__init__(phase)
        self.look, self.seen = look, []

    def __call__(self, context):
        self.seen.append(self.look(context))


def called(folder, *callbacks, epochs=1, **changes):
    """Train for `epochs` epochs of two steps, with a validation on two batches after each epoch. Return the Runner."""
    arguments = {
        "train_cfg": dict(by_epoch=True, max_epochs=epochs),
        "train_dataloader": loader(batch_size=20),
        **validation(),
        "val_dataloader": loader(batch_size=20, shuffle=False),
        "custom_hooks": callback_hooks(callbacks),
        # This hook does not save the best checkpoint.
        "default_hooks": dict(checkpoint=dict(type="CheckpointHook", interval=1)),
        **changes,
    }
    return run(folder, **arguments)


def names(callback):
    return [event for event, _ in callback.seen]


STEP = [
    "on_train_batch_start",
    "on_train_batch_loss_end",
    "on_train_batch_gradient_step_end",
    "on_train_batch_end",
]
PASS = ["on_validation_batch_start", "on_validation_batch_end"] * 2
EPOCH = ["on_train_loader_start", *STEP, *STEP, "on_train_loader_end"]
CHECK = ["on_validation_loader_start", *PASS, "on_validation_loader_end"]


def test_events_occur_in_supergradients_order(tmp_path):
    callback = Recording()
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc"))
    called(
        tmp_path, callback, dict(AverageBestHook=dict(metric="acc")), epochs=2, default_hooks=hooks,
        **{**validation(Scripted([0.5, 0.4, 0.0])), "val_dataloader": loader(batch_size=20, shuffle=False)},
    )  # fmt: skip
    # The validation of the averaged model has batch events, but no loader events.
    mean = ["on_average_best_models_validation_start", *PASS, "on_average_best_models_validation_end"]
    first = [*EPOCH, *CHECK, "on_validation_end_best_epoch"]
    assert names(callback) == ["on_training_start", *first, *EPOCH, *CHECK, *mean, "on_training_end"]


def test_gradient_step_event_occurs_after_each_accumulation_window(tmp_path):
    callback = At(Phase.TRAIN_BATCH_STEP, lambda context: context.batch_idx)
    optim = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)
    called(tmp_path, callback, optim_wrapper=optim, train_dataloader=loader(batch_size=8))
    assert callback.seen == [1, 3, 4]  # the last accumulation window has one batch


# ---- context -------------------------------------------------------------------------------------------


def test_metrics_dict_has_mean_losses_and_validation_metrics(tmp_path):
    losses = At(Phase.TRAIN_BATCH_END, lambda context: context.loss_log_items["loss"].clone())
    trained = At(Phase.TRAIN_EPOCH_END, lambda context: dict(context.metrics_dict))
    validated = At(Phase.VALIDATION_EPOCH_END, lambda context: dict(context.metrics_dict))
    called(tmp_path, losses, trained, validated, epochs=2, **validation(Scripted([0.5, 0.4])))
    assert validated.seen == [{"acc": 0.5}, {"acc": 0.4}]
    for epoch, metrics in enumerate(trained.seen):
        mean = torch.stack(losses.seen[2 * epoch : 2 * epoch + 2]).double().mean().item()
        assert metrics == {"loss": pytest.approx(mean, rel=1e-6)}


def test_callbacks_do_not_change_the_training_result(tmp_path):
    plain = run(tmp_path / "a", model=dict(type=Net, dropout=0.3, norm=True))
    watched = run(
        tmp_path / "b",
        model=dict(type=Net, dropout=0.3, norm=True),
        custom_hooks=callback_hooks([Recording()]),
    )
    assert_same(weights(plain), weights(watched))


# ---- stopping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["TRAIN_BATCH_END", "TRAIN_EPOCH_END", "VALIDATION_EPOCH_END"])
def test_stop_training_ends_after_validation_and_checkpoint(tmp_path, phase):
    def stop(context):
        if context.epoch == 1:
            context.stop_training = True

    last_epoch = At(Phase.POST_TRAINING, lambda context: context.epoch)
    runner = called(tmp_path, At(phase, stop), last_epoch, epochs=5)
    assert (runner.epoch, runner.iter) == (2, 4)
    assert last_epoch.seen == [1]
    assert {path.name for path in tmp_path.glob("*.pth")} == {"epoch_1.pth", "epoch_2.pth"}
    assert len(runner.message_hub.get_scalar("val/acc").data[0]) == 2


# ---- callback entries ---------------------------------------------------------------------------------


@HOOKS.register_module()
class CountsSteps(Callback):
    steps = 0

    def __init__(self, by=1):
        self.by = by

    def on_train_batch_end(self, context):
        CountsSteps.steps += self.by


@pytest.mark.parametrize("event", ["on_train_batch_backward_end", "on_train_batch_gradient_step_start"])
def test_callback_events_inside_the_step_are_rejected(event):
    late = type("Late", (Callback,), {event: lambda self, context: None})
    with pytest.raises(ConfigError, match=rf"phase_callbacks\[0\]: {event} cannot be called.*clip_grad_norm"):
        callback_hooks([late()])


def test_the_logger_passes_numbers_and_images_to_the_visualizer(tmp_path):
    image = torch.rand(3, 4, 5)

    def record(context):
        logger = context.sg_logger
        logger.add_scalar("own/one", torch.tensor(0.5), global_step=7)
        logger.add_scalars({"own/two": 2.0})
        logger.add_image("own/chw", image, global_step=1)
        logger.add_images("own/hwc", image.permute(1, 2, 0)[None].numpy(), "NHWC")
        logger.add_config("own", {"key": 3})
        logger.flush()
        return logger.local_dir(), context.ckpt_dir

    class Recorded(Visualizer):
        def __init__(self):
            super().__init__()
            self.calls = []

        def add_scalar(self, name, value, step=0):
            self.calls.append((name, value, step))

        def add_scalars(self, scalar_dict, step=0, file_path=None):
            self.calls += [(name, value, step) for name, value in scalar_dict.items()]

        def add_image(self, name, image, step=0):
            self.calls.append((name, image, step))

        def add_config(self, config):
            self.calls.append(config)

    class Only:
        epoch, work_dir, visualizer = 2, "folder", Recorded()

    logger = SGLogger(Only())
    context = SimpleNamespace(sg_logger=logger, ckpt_dir="folder")
    assert record(context) == ("folder", "folder")
    one, two, chw, hwc, config = Only.visualizer.calls
    assert (one, two, config) == (("own/one", 0.5, 7), ("own/two", 2.0, 2), {"own": {"key": 3}})
    wanted = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    assert (chw[0], chw[2], hwc[0], hwc[2]) == ("own/chw", 1, "own/hwc/0", 2)
    assert (chw[1] == wanted).all()
    assert (hwc[1] == wanted).all()
    callback = At(Phase.TRAIN_EPOCH_END, record)
    called(tmp_path, callback)
    assert callback.seen[0][0] == callback.seen[0][1]
