"""Tests of phase callbacks: events, context attributes, and errors for unavailable attributes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from slipstream import Trainer
from slipstream.errors import ConfigError, DataError, UnknownNameError
from slipstream.hooks import EMAHook, Hook
from slipstream.registry import HOOKS
from slipstream.runner import Runner
from slipstream.training.callbacks import BinarySegmentationVisualizationCallback
from slipstream.training.callbacks import (
    Callback,
    CallbackHook,
    ContextError,
    EarlyStop,
    Phase,
    PhaseCallback,
    callback_hooks,
)
from slipstream.training.callbacks import SGLogger
from slipstream.visualization import Visualizer
from tiny_runs import Accuracy, Net, Scripted, assert_same, loader, run, training, validation, weights

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


def test_test_loop_calls_test_events(tmp_path):
    callback = Recording(lambda context: getattr(context, "metrics_dict", None))
    test = dict(test_dataloader=loader(batch_size=20), test_cfg=dict(), test_evaluator=dict(type=Accuracy))
    runner = Runner(**training(tmp_path, custom_hooks=callback_hooks([callback]), **test))
    metrics = runner.test()
    batches = ["on_test_batch_start", "on_test_batch_end"] * 2
    assert names(callback) == ["on_test_loader_start", *batches, "on_test_loader_end"]
    assert callback.seen[-1][1] == metrics


@pytest.mark.parametrize("phase", list(Phase))
def test_phase_callback_is_called_only_at_its_phase(tmp_path, phase):
    counts = dict(PRE_TRAINING=1, POST_TRAINING=1, TRAIN_EPOCH_START=2, TRAIN_EPOCH_END=2, TRAIN_BATCH_END=4)
    counts |= dict(
        TRAIN_BATCH_STEP=4, VALIDATION_BATCH_END=4, VALIDATION_EPOCH_END=2, VALIDATION_END_BEST_EPOCH=1
    )
    counts |= dict(TEST_BATCH_END=0, TEST_END=0)
    callback = At(phase, lambda context: None)
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc"))
    evaluation = {**validation(Scripted([0.5, 0.4])), "val_dataloader": loader(batch_size=20, shuffle=False)}
    called(tmp_path, callback, epochs=2, default_hooks=hooks, **evaluation)
    assert len(callback.seen) == counts[phase.value]
    assert At(phase.value, None).phase is phase, "a phase given by name is not converted to a Phase"


def test_stages_without_an_event_skip_the_callback(tmp_path):
    class Ends(Callback):
        def on_train_loader_end(self, context):
            pass

    for callback in (Ends(), At(Phase.TRAIN_EPOCH_END, None)):
        hook = CallbackHook(callback)
        stages = [*Hook.stages, "after_new_best", "before_average_val", "after_average_val"]
        assert [stage for stage in stages if hook.method_at(stage)] == ["after_train_epoch"]


def test_gradient_step_event_occurs_after_each_accumulation_window(tmp_path):
    callback = At(Phase.TRAIN_BATCH_STEP, lambda context: context.batch_idx)
    optim = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)
    called(tmp_path, callback, optim_wrapper=optim, train_dataloader=loader(batch_size=8))
    assert callback.seen == [1, 3, 4]  # the last accumulation window has one batch


# ---- context -------------------------------------------------------------------------------------------


def test_context_has_the_attributes_of_the_run(tmp_path):
    def look(context):
        return (
            context.epoch, context.net, context.optimizer, context.device, context.experiment_name,
            context.ckpt_dir, context.metric_to_watch, context.ddp_silent_mode, context.ema_model,
            len(context.train_loader), len(context.valid_loader), context.stop_training,
        )  # fmt: skip

    callback = At(Phase.TRAIN_EPOCH_START, look)
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc"))
    runner = called(tmp_path, callback, epochs=2, default_hooks=hooks)
    facts = (
        runner.model, runner.optim_wrapper.optimizer, torch.device("cpu"), runner.experiment_name, str(tmp_path),
        "acc", False, None, 2, 2, False,
    )  # fmt: skip
    assert callback.seen == [(0, *facts), (1, *facts)]


def test_context_epoch_does_not_change_during_validation(tmp_path):
    callback = Recording(lambda context: context.epoch)
    called(tmp_path, callback, epochs=2)
    assert [epoch for event, epoch in callback.seen if event.startswith("on_validation")] == [0] * 6 + [1] * 6
    assert callback.seen[0] == ("on_training_start", 0)
    assert callback.seen[-1] == ("on_training_end", 1)


def test_context_has_batches_losses_and_predictions(tmp_path):
    trained = At(
        "TRAIN_BATCH_END", lambda c: (c.batch_idx, c.inputs, c.target, c.loss_log_items["loss"].clone())
    )
    validated = At("VALIDATION_BATCH_END", lambda c: (c.batch_idx, c.inputs, c.target, c.preds))
    runner = called(tmp_path, trained, validated)
    assert [entry[0] for entry in trained.seen] == [0, 1]
    assert all(
        x.shape == (20, 4) and y.shape == (20,) and not loss.requires_grad for _, x, y, loss in trained.seen
    )
    for number, (index, inputs, target, (scores, targets)) in enumerate(validated.seen):
        assert index == number
        assert torch.equal(target, targets)
        with torch.no_grad():
            torch.testing.assert_close(scores, runner.model(inputs, target, "tensor"))


class Named(Dataset):
    """A dataset whose samples have a dict as the third item."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 4, 4), index / 40.0), index % 3, {"path": f"{index}.png", "index": index}


def test_context_has_the_third_item_of_a_batch_and_its_entries(tmp_path):
    def look(context):
        return context.additional_batch_items, context.path, context.index.tolist()

    trained, validated = At("TRAIN_BATCH_END", look), At("VALIDATION_BATCH_END", look)
    batches = DataLoader(Named(), batch_size=20)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    params = {
        "max_epochs": 1,
        "initial_lr": 0.1,
        "optimizer": "SGD",
        "loss": "CrossEntropyLoss",
        "save_model": False,
    }
    params |= {"valid_metrics_list": ["Accuracy"], "phase_callbacks": [trained, validated]}
    Trainer("named", tmp_path).train(network, params, batches, batches)
    for seen in (trained.seen, validated.seen):
        items, paths, indices = seen[1]
        assert items.keys() == {"path", "index"}
        assert indices == list(range(20, 40))
        assert list(paths) == [f"{index}.png" for index in indices]


def test_context_has_no_additional_items_for_pairs(tmp_path):
    pairs = At("TRAIN_BATCH_END", lambda context: context.additional_batch_items)
    called(tmp_path, pairs)
    assert pairs.seen == [{}, {}]


def test_binary_visualization_records_colored_images(tmp_path):
    recorded = []
    logger = SimpleNamespace(add_images=lambda *arguments: recorded.append(arguments))
    callback = BinarySegmentationVisualizationCallback(
        "VALIDATION_BATCH_END", freq=2, last_img_idx_in_batch=1
    )
    masks = {"preds": torch.tensor([[[1, 1, 0, 0]]] * 2), "target": torch.tensor([[[1, 0, 1, 0]]] * 2)}
    images = torch.full((2, 3, 1, 4), 100, dtype=torch.uint8)
    for epoch, batch in ((0, 0), (0, 1), (1, 0), (2, 0)):
        callback(SimpleNamespace(epoch=epoch, batch_idx=batch, inputs=images, sg_logger=logger, **masks))
    assert [(name, layout, epoch) for name, _, layout, epoch in recorded] == [
        ("batch_0_images", "NCHW", 0),
        ("batch_0_images", "NCHW", 2),
    ]
    found = recorded[0][1]
    assert found.dtype == torch.uint8
    assert found[:, :, 0].permute(0, 2, 1).tolist() == [
        [[20, 122, 20], [224, 20, 20], [20, 20, 224], [100, 100, 100]]
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"phase": "TRAIN_BATCH_END", "freq": 1}, "phase: must be VALIDATION_BATCH_END"),
     ({"phase": "VALIDATION_BATCH_END", "freq": 0}, "freq: must be at least 1")],
)  # fmt: skip
def test_binary_visualization_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BinarySegmentationVisualizationCallback(**arguments)


def test_metrics_dict_has_mean_losses_and_validation_metrics(tmp_path):
    losses = At(Phase.TRAIN_BATCH_END, lambda context: context.loss_log_items["loss"].clone())
    trained = At(Phase.TRAIN_EPOCH_END, lambda context: dict(context.metrics_dict))
    validated = At(Phase.VALIDATION_EPOCH_END, lambda context: dict(context.metrics_dict))
    called(tmp_path, losses, trained, validated, epochs=2, **validation(Scripted([0.5, 0.4])))
    assert validated.seen == [{"acc": 0.5}, {"acc": 0.4}]
    for epoch, metrics in enumerate(trained.seen):
        mean = torch.stack(losses.seen[2 * epoch : 2 * epoch + 2]).double().mean().item()
        assert metrics == {"loss": pytest.approx(mean, rel=1e-6)}


def test_model_has_ema_weights_at_the_end_of_validation(tmp_path):
    def look(context):
        return {name: value.clone() for name, value in context.net.state_dict().items()}

    callback = At(Phase.VALIDATION_EPOCH_END, look)
    entries = [dict(EMAHook=dict(momentum=0.1)), dict(AverageBestHook=dict(metric="acc")), callback]
    runner = called(tmp_path, *entries)
    average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.module
    assert_same(callback.seen[0], dict(average.state_dict()))
    assert not torch.equal(callback.seen[0]["first.weight"], weights(runner)["first.weight"])


@pytest.mark.parametrize(
    ("phase", "name", "reason"),
    [
        ("TRAIN_BATCH_END", "preds", "a training step returns only losses"),
        ("TRAIN_BATCH_END", "metrics_dict", "metrics are available when"),
        ("TRAIN_EPOCH_START", "batch_idx", "available only at batch events"),
        ("TRAIN_EPOCH_END", "inputs", "available only at batch events"),
        ("VALIDATION_EPOCH_END", "loss_log_items", "after a training step"),
        ("PRE_TRAINING", "valid_metrics", "context.runner.val_loop.evaluator"),
        ("PRE_TRAINING", "criterion", "in this run"),
        ("PRE_TRAINING", "metric_to_watch", "in this run"),
        ("PRE_TRAINING", "lr_warmup_epochs", "use an attribute of context.runner instead"),
        ("PRE_TRAINING", "arch_params", "use context.net instead"),
        ("PRE_TRAINING", "optimiser", "did you mean 'optimizer'"),
    ],
)
def test_unavailable_attribute_raises_an_error_with_the_reason(tmp_path, phase, name, reason):
    event = dict(
        TRAIN_BATCH_END="on_train_batch_loss_end", TRAIN_EPOCH_START="on_train_loader_start",
        TRAIN_EPOCH_END="on_train_loader_end", VALIDATION_EPOCH_END="on_validation_loader_end",
        PRE_TRAINING="on_training_start",
    )[phase]  # fmt: skip
    where = rf"{event} \(Phase.{phase}\)"
    with pytest.raises(ContextError, match=f"context.{name} is not available (at {where}: .*)?{reason}"):
        called(tmp_path, At(phase, lambda context: getattr(context, name)))
    asked = At(phase, lambda context: (hasattr(context, name), getattr(context, name, 7)))
    called(tmp_path / "b", asked)
    assert asked.seen[0] == (False, 7)


def test_custom_context_attributes_are_kept(tmp_path):
    def count(context):
        context.update_context(mine=getattr(context, "mine", 0) + 1)
        return context.mine

    callback = At(Phase.TRAIN_BATCH_END, count)
    called(tmp_path, callback, epochs=2)
    assert callback.seen == [1, 2, 3, 4]


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


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        (dict(monitor="acc", mode="max", patience=2), [0.5, 0.6, 0.6, 0.55, 0.9], 4),
        (dict(monitor="loss", patience=1), [0.5, 0.4, 0.45, 0.1], 3),
        (dict(monitor="loss", patience=1, min_delta=0.2), [0.5, 0.4, 0.1], 2),
        (dict(monitor="acc", mode="max", threshold=0.7), [0.5, 0.8, 0.9], 2),
        (dict(monitor="acc", mode="max", check_finite=True), [0.5, float("nan"), 0.9], 2),
    ],
)
@pytest.mark.parametrize("form", ["object", "recipe"])
def test_early_stop_supports_supergradients_arguments(tmp_path, options, values, epochs, form):
    options = dict(phase="VALIDATION_EPOCH_END", **options)
    entry = EarlyStop(**options) if form == "object" else dict(EarlyStop=options)
    evaluation = validation(Scripted(values, options["monitor"]))
    assert called(tmp_path, entry, epochs=len(values), **evaluation).epoch == epochs


def test_verbose_early_stop_logs_the_best_value(tmp_path, capsys):
    entry = dict(EarlyStop=dict(phase="VALIDATION_EPOCH_END", monitor="loss", verbose=True))
    called(tmp_path, entry, epochs=2, log_level="INFO", **validation(Scripted([0.5, 0.6], "loss")))
    assert "best loss 0.5, 1 validation run ago" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(phase="TRAIN_EPOCH_END"), r"phase: EarlyStop only supports VALIDATION_EPOCH_END"),
        (dict(mode="less"), r"mode: must be 'min' or 'max'"),
        (dict(patience=-1), r"patience: must be an int of at least 0"),
    ],
)
def test_early_stop_rejects_invalid_arguments(tmp_path, options, message):
    entry = dict(EarlyStop=dict(dict(phase="VALIDATION_EPOCH_END", monitor="acc"), **options))
    with pytest.raises(ConfigError, match=rf"^custom_hooks\[0\]\.{message}"):
        called(tmp_path, entry)


# ---- callback entries ---------------------------------------------------------------------------------


@HOOKS.register_module()
class CountsSteps(Callback):
    steps = 0

    def __init__(self, by=1):
        self.by = by

    def on_train_batch_end(self, context):
        CountsSteps.steps += self.by


@pytest.mark.parametrize(
    "entry",
    [
        "CountsSteps",
        dict(CountsSteps=dict(by=1)),
        dict(_target_="super_gradients.some.where.CountsSteps", by=1),
        CountsSteps(),
        CallbackHook(CountsSteps()),
    ],
)
def test_callback_can_be_a_name_or_an_object(tmp_path, monkeypatch, entry):
    monkeypatch.setattr(CountsSteps, "steps", 0)
    called(tmp_path, entry)
    assert CountsSteps.steps == 2


def test_named_callbacks_become_plain_configurations():
    named = callback_hooks(["CountsSteps", dict(ProfilerHook=dict(json_trace_path="x"))])
    assert json.loads(json.dumps(named)) == [
        dict(type="CallbackHook", callback=dict(type="CountsSteps")),
        dict(type="ProfilerHook", json_trace_path="x"),
    ]


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("EarlyStopp", UnknownNameError, "did you mean 'EarlyStop'"),
        (dict(a=1, b=2), ConfigError, "must be a name, {Name: {arguments}}"),
        (7, ConfigError, "a phase callback must be a Callback, a PhaseCallback or a Hook, not 7"),
    ],
)
def test_invalid_callback_entry_raises_an_error_with_config_path(entry, error, message):
    with pytest.raises(error, match=rf"^training_params\.phase_callbacks\[1\]: .*{message}"):
        callback_hooks(["EarlyStop", entry])


@pytest.mark.parametrize("event", ["on_train_batch_backward_end", "on_train_batch_gradient_step_start"])
def test_callback_events_inside_the_step_are_rejected(event):
    late = type("Late", (Callback,), {event: lambda self, context: None})
    with pytest.raises(
        ConfigError, match=rf"phase_callbacks\[0\]: Late.{event} cannot be called.*clip_grad_norm"
    ):
        callback_hooks([late()])


def test_unknown_phase_error_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="phase: no phase is named 'TEST_ENDS'; did you mean 'TEST_END'"):
        At("TEST_ENDS", None)


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


def test_unsupported_logger_methods_and_image_formats_are_rejected():
    logger = SGLogger(SimpleNamespace(epoch=0))
    with pytest.raises(
        AttributeError, match=r"context\.sg_logger\.add_histogram is not supported; use context"
    ):
        logger.add_histogram("a", [1])
    with pytest.raises(DataError, match=r"of shape \(2, 2\) in 'CHW' format"):
        logger.add_image("a", torch.zeros(2, 2))
