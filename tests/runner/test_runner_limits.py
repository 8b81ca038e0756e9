"""Tests of the validation loss, of lists of batches as dataloaders, and of the options for short runs.

Most tests compare a Runner with hand-written float64 loops.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slipstream import Runner
from slipstream.errors import ConfigError
from slipstream.hooks import CheckpointHook, Hook
from tiny_runs import (
    Accuracy,
    Net,
    Stop,
    StoppedError,
    assert_same,
    loader,
    run,
    samples,
    scalars,
    training,
    validation,
    weights,
)


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(count=40):
    inputs, targets = samples(count)
    return TensorDataset(inputs.double(), targets)


def arguments(work_dir, **changes):
    plain = dict(model=net(), loss_fn=F.cross_entropy, train_dataloader=loader(data(), shuffle=False))
    return {**training(work_dir), **plain, **changes}


def by_hand(batches):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


def slices(count, dataset=None):
    inputs, targets = (dataset or data()).tensors
    return [(inputs[8 * i : 8 * i + 8], targets[8 * i : 8 * i + 8]) for i in range(count)]


def assert_close(model, expected):
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


class Seen(Hook):
    """Store the inputs of each batch."""

    def __init__(self):
        self.batches = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.batches.append(data_batch[0].clone())


COMPILED = dict(compile=dict(backend="eager"))


# ---- validation loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [{}, COMPILED, dict(ema=dict(type="constant", decay=0.7))], ids=str)
def test_validation_loss_is_the_mean_over_the_samples(tmp_path, speed):
    val = dict(
        val_dataloader=dict(batch_size=16, dataset=data(), shuffle=False), val_cfg={}, val_evaluator="loss"
    )
    runner = Runner(**arguments(tmp_path, speed=speed, **val))  # batches of 16, 16 and 8 samples
    runner.train()
    weights = torch.load(tmp_path / "epoch_2.pth", weights_only=True)["state_dict"]
    model = net()
    model.load_state_dict(weights)  # with EMA, the averaged weights
    inputs, targets = data().tensors
    expected = F.cross_entropy(model(inputs), targets).item()
    assert runner.message_hub.get_scalar("val/loss").current() == pytest.approx(expected, rel=1e-9)
    lines = [line for line in scalars(runner) if "val/loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["val/loss"] == pytest.approx(expected, rel=1e-9)
    log = next(tmp_path.rglob("*.log")).read_text()
    assert f"loss: {expected:.4f}" in log.rpartition("Epoch(val)")[2]


# ---- lists of batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [{}, COMPILED, dict(prefetch=2, accumulate=1)], ids=str)
def test_training_uses_a_list_of_batches_in_order(tmp_path, speed):
    batches = slices(3)
    runner = Runner(**arguments(tmp_path, train_dataloader=batches, val_dataloader=batches, val_cfg={},
                                val_evaluator="loss", speed=speed))  # fmt: skip
    runner.train()
    assert_close(runner.model, by_hand(batches * 2))
    assert runner.max_iters == 6
    losses = torch.stack([F.cross_entropy(runner.model(x), y) for x, y in batches])
    assert runner.val()["loss"] == pytest.approx(losses.mean().item(), rel=1e-9)


# ---- short runs ---------------------------------------------------------------------------------------


def ready(**options):
    return DataLoader(data(), batch_size=8, **options)


@pytest.mark.parametrize("make", [lambda: loader(data(), shuffle=False), ready, lambda: slices(5)])
@pytest.mark.parametrize("speed", [{}, COMPILED], ids=str)
def test_limited_epochs_use_the_first_batches(tmp_path, make, speed):
    val = dict(val_dataloader=make(), val_cfg={}, val_evaluator="loss")
    limits = dict(limit_train_batches=2, limit_val_batches=3)
    runner = Runner(**arguments(tmp_path, train_dataloader=make(), speed=speed, **val, **limits))
    runner.train()
    assert runner.max_iters == 4
    assert_close(runner.model, by_hand(slices(2) * 2))
    inputs, targets = (tensor[:24] for tensor in data().tensors)
    expected = F.cross_entropy(runner.model(inputs), targets).item()
    assert runner.val()["loss"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "cfg", [dict(by_epoch=True, max_epochs=3), dict(by_epoch=False, max_iters=6)], ids=str
)
@pytest.mark.parametrize("make", [lambda: loader(data()), lambda: ready(shuffle=True), lambda: slices(5)])
def test_overfit_batches_repeats_the_same_shuffled_batches(tmp_path, cfg, make):
    seen = Seen()
    changes = dict(train_dataloader=make(), overfit_batches=2, train_cfg=cfg, custom_hooks=[seen])
    Runner(**arguments(tmp_path, **changes)).train()
    first, second = seen.batches[:2]
    assert not torch.equal(first, second)
    assert len(seen.batches) == 6
    assert all(torch.equal(batch, [first, second][n % 2]) for n, batch in enumerate(seen.batches))


@pytest.mark.parametrize(
    "cfg", [dict(by_epoch=True, max_epochs=30), dict(by_epoch=False, max_iters=300)], ids=str
)
@pytest.mark.parametrize(("value", "steps"), [(True, 1), (3, 3)])
def test_fast_dev_run_has_few_steps_one_validation_and_no_checkpoints(tmp_path, cfg, value, steps):
    calls = []

    class Count(Accuracy):
        def process(self, data_batch, data_samples):
            calls.append(1)
            super().process(data_batch, data_samples)

    runner = Runner(**training(tmp_path, train_cfg=cfg, fast_dev_run=value, **validation(dict(type=Count))))
    runner.train()
    assert runner.iter == steps
    assert len(calls) == steps
    assert not list(tmp_path.rglob("*.pth"))


def test_fast_dev_run_reports_an_unknown_metric_in_save_best(tmp_path):
    hooks = dict(default_hooks=dict(checkpoint=dict(save_best="mIoU")))
    runner = Runner(**training(tmp_path, fast_dev_run=True, **validation(), **hooks))
    with pytest.raises(ConfigError, match="unknown metric 'mIoU'"):
        runner.train()


def test_fast_dev_run_ignores_schedulers_that_begin_later_and_all_hooks_that_save(tmp_path):
    schedulers = [
        dict(type="LinearLR", start_factor=0.1, end=50, by_epoch=False),
        dict(type="PolyLR", begin=50, by_epoch=False),
        dict(type="MultiStepLR", begin=2, milestones=[3]),
    ]
    runner = Runner(
        **training(tmp_path, param_scheduler=schedulers, fast_dev_run=3, custom_hooks=[CheckpointHook(1)])
    )
    runner.train()
    assert len(runner.param_schedulers) == 1
    assert not list(tmp_path.rglob("*.pth"))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*data().tensors, strict=True))

    def __len__(self):
        return 40


@pytest.mark.parametrize("workers", [0, 1])
def test_limit_of_an_iterable_dataset_ends_each_epoch(tmp_path, workers):
    train = dict(dataset=Stream(), batch_size=8, num_workers=workers)
    changes = dict(train_dataloader=train, train_cfg=dict(by_epoch=True, max_epochs=2), limit_train_batches=3)
    runner = Runner(**arguments(tmp_path, **changes))
    runner.train()
    assert (runner.epoch, runner.iter) == (2, 6)
    assert_close(runner.model, by_hand([*slices(3), *slices(3)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(limit_train_batches=0), "limit_train_batches"),
        (dict(limit_val_batches=1.5), "limit_val_batches"),
        (
            dict(overfit_batches=2, limit_train_batches=3),
            "overfit_batches: cannot be combined with limit_train",
        ),
        (dict(fast_dev_run=True, resume=True), "fast_dev_run: cannot be combined with resume"),
        (dict(fast_dev_run=-1), "fast_dev_run"),
    ],
)
def test_options_for_short_runs_are_checked(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        Runner(**arguments(tmp_path, **changes)).train()


class Validations(Hook):
    """Store the number of steps before each validation."""

    def __init__(self):
        self.steps = []

    def after_val_epoch(self, runner, metrics=None):
        self.steps.append(runner.iter)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (dict(val_interval=0.5), [3, 5, 8, 10]),
        (dict(val_interval=0.34, val_begin=2), [7, 9, 10]),
        (dict(val_interval=0.1), list(range(1, 11))),
    ],
    ids=str,
)
def test_validation_runs_within_epochs(tmp_path, cfg, expected):
    runs, plain = Validations(), Validations()
    options = dict(model=dict(type=Net, dropout=0.3), **validation())
    runner = run(
        tmp_path / "a", train_cfg=dict(by_epoch=True, max_epochs=2, **cfg), custom_hooks=[runs], **options
    )
    assert runs.steps == expected
    whole = run(tmp_path / "b", custom_hooks=[plain], **options)
    assert plain.steps == [5, 10]
    assert_same(weights(runner), weights(whole))
    assert [line["step"] for line in scalars(runner) if "acc" in line] == expected


@pytest.mark.parametrize("stage", ["after_train_iter", "after_val_iter"])
def test_a_run_that_stops_before_a_validation_within_an_epoch_validates_on_resume(tmp_path, stage):
    runs = Validations()
    options = dict(
        model=dict(type=Net, dropout=0.3), train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=0.5)
    )
    options |= dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1)))
    whole = run(tmp_path / "whole", **options, **validation())
    with pytest.raises(StoppedError):
        run(
            tmp_path / "parts",
            custom_hooks=[runs, Stop(2 if stage == "after_train_iter" else 3, stage)],
            **options,
            **validation(),
        )
    resumed = run(tmp_path / "parts", custom_hooks=[runs], resume=True, **options, **validation())
    assert runs.steps == [3, 5, 8, 10]
    assert_same(weights(resumed), weights(whole))


def test_validation_within_epochs_of_a_changed_length(tmp_path):
    class Halves(Hook):
        def before_train_epoch(self, runner):
            if runner.epoch == 1:
                runner.train_dataloader.batch_sampler.batch_size //= 2

    runs = Validations()
    cfg = dict(by_epoch=True, max_epochs=2, val_interval=0.5)
    run(tmp_path, train_cfg=cfg, custom_hooks=[Halves(), runs], **validation())
    assert runs.steps == [3, 5, 10, 15]


def test_limits_may_be_fractions(tmp_path):
    batches = Seen()
    limits = dict(limit_train_batches=0.5, limit_val_batches=0.2, val_evaluator="loss", val_cfg={})
    limits["val_dataloader"] = loader(data(), shuffle=False)
    runner = Runner(**arguments(tmp_path, custom_hooks=[batches], **limits))
    runner.train()
    assert len(batches.batches) == 4  # two of five batches in each epoch
    assert runner.val_loop.batches == 1
