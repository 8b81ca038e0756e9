"""Tests of the validation loss, of lists of batches as dataloaders, and of the options for short runs.

Most tests compare a Runner with hand-written float64 loops.
"""

import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slipstream import Runner
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.errors import ConfigError, DataError
from slipstream.hooks import CheckpointHook, Hook
from tiny_runs import Accuracy, Net, loader, samples, scalars, training, validation


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


class TwoLosses(Net):
    def forward(self, inputs, targets, mode):
        if mode != "loss":
            raise AssertionError
        scores = super().forward(inputs, targets, "tensor")
        assert self.training == torch.is_grad_enabled()
        return {"loss_class": F.cross_entropy(scores, targets), "loss_size": scores.pow(2).mean()}


def test_each_named_loss_of_a_base_model_is_validated(tmp_path):
    torch.manual_seed(0)
    model = TwoLosses(dropout=0.5)
    runner = Runner(**training(tmp_path, model=model, **{**validation(), "val_evaluator": "loss"}))
    runner.train()
    found = runner.val()
    model.eval()
    scores = Net.forward(model, *samples(), "tensor")
    size, kind = scores.pow(2).mean().item(), F.cross_entropy(scores, samples()[1]).item()
    assert found == pytest.approx({"loss": size + kind, "loss_class": kind, "loss_size": size}, rel=1e-5)


def test_best_checkpoint_has_the_lowest_loss(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, save_best="loss"))
    Runner(**training(tmp_path, default_hooks=hooks, **{**validation(), "val_evaluator": "loss"})).train()
    assert (tmp_path / "best_loss_epoch_2.pth").exists()


class OwnStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def train_step(self, data, optim_wrapper):
        loss = F.cross_entropy(self.layer(data[0]), data[1])
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def test_validation_with_the_loss_requires_a_model_that_returns_losses(tmp_path):
    runner = Runner(**training(tmp_path, model=OwnStep(), **{**validation(), "val_evaluator": "loss"}))
    with pytest.raises(ConfigError, match="'loss' requires a BaseModel or loss_fn, but OwnStep defines only"):
        runner.train()


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


class Stop(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 5:
            raise KeyboardInterrupt


def test_run_with_a_list_can_be_resumed_inside_an_epoch(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=5))
    changes = dict(train_dataloader=slices(3), default_hooks=hooks)
    stopped = Runner(**arguments(tmp_path, **changes, custom_hooks=[dict(type=Stop, priority="LOWEST")]))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = Runner(**arguments(tmp_path, **changes, resume=True))
    resumed.train()
    assert_close(resumed.model, by_hand(slices(3) * 2))


def test_empty_list_raises_an_error(tmp_path):
    with pytest.raises(DataError, match="train_dataloader is an empty list"):
        Runner(**arguments(tmp_path, train_dataloader=[])).train()


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


def test_limited_run_can_be_resumed(tmp_path):
    changes = dict(train_dataloader=loader(data()), limit_train_batches=3)
    whole = Runner(**arguments(tmp_path / "whole", **changes))
    whole.train()
    Runner(**arguments(tmp_path / "parts", **changes, train_cfg=dict(by_epoch=True, max_epochs=1))).train()
    resumed = Runner(**arguments(tmp_path / "parts", **changes, resume=True))
    resumed.train()
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


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


@pytest.mark.parametrize(
    "hooks",
    [
        dict(default_hooks=dict(checkpoint=dict(save_best="mIoU"))),
        dict(custom_hooks=[CheckpointHook(1, save_best=["acc", "mIoU"], rule="greater")]),
    ],
    ids=["default", "custom"],
)
def test_fast_dev_run_reports_an_unknown_metric_in_save_best(tmp_path, hooks):
    runner = Runner(**training(tmp_path, fast_dev_run=True, **validation(), **hooks))
    with pytest.raises(ConfigError, match="unknown metric 'mIoU'"):
        runner.train()


class Interrupt(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        signal.raise_signal(signal.SIGINT)


def test_interrupted_fast_dev_run_leaves_the_checkpoints_of_the_folder_unchanged(tmp_path):
    Runner(**training(tmp_path)).train()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(KeyboardInterrupt):
        Runner(**training(tmp_path, fast_dev_run=3, custom_hooks=[Interrupt()])).train()
    files = {path for path in tmp_path.iterdir() if path.is_file()}
    assert {path: path.read_bytes() for path in files - {tmp_path / ".lock"}} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }


def test_fast_dev_run_ignores_schedulers_that_begin_later_and_all_hooks_that_save(tmp_path):
    schedulers = [
        dict(type="LinearLR", start_factor=0.1, end=50, by_epoch=False),
        dict(type="PolyLR", begin=50, by_epoch=False),
        dict(type="MultiStepLR", begin=2, milestones=[3]),
    ]
    hooks = dict(
        default_hooks=dict(mine=dict(type="PreemptionHook")), custom_hooks=[CheckpointHook(1), Interrupt()]
    )
    runner = Runner(**training(tmp_path, param_scheduler=schedulers, fast_dev_run=3, **hooks))
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    assert len(runner.param_schedulers) == 1
    assert not list(tmp_path.rglob("*.pth"))


class OwnLoader(DataLoader):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*data().tensors, strict=True))

    def __len__(self):
        return 40


class Endless(IterableDataset):
    """Repeats the samples endlessly."""

    def __iter__(self):
        while True:
            yield from zip(*data().tensors, strict=True)


@pytest.mark.parametrize(
    "make", [Stream, Endless, lambda: DataLoader(Stream(), 8), lambda: DataLoader(Endless(), 8)]
)
@pytest.mark.parametrize("workers", [0, dict(num_workers=1), dict(num_workers=1, persistent_workers=True)])
def test_limit_of_an_iterable_dataset_ends_each_epoch(tmp_path, make, workers):
    source = make()
    if isinstance(source, DataLoader):
        train = DataLoader(source.dataset, 8, **(workers or {}))
    else:
        train = dict(dataset=source, batch_size=8, **(workers or {}))
    runner = Runner(
        **arguments(
            tmp_path,
            train_dataloader=train,
            train_cfg=dict(by_epoch=True, max_epochs=2),
            limit_train_batches=3,
        )
    )
    runner.train()
    assert (runner.epoch, runner.iter) == (2, 6)
    assert_close(runner.model, by_hand([*slices(3), *slices(3)]))


def test_limited_epoch_ends_early_if_the_stream_is_shorter(tmp_path):
    runner = Runner(
        **arguments(
            tmp_path,
            train_dataloader=DataLoader(Stream(), 8),
            train_cfg=dict(by_epoch=True, max_epochs=2),
            limit_train_batches=9,
        )
    )
    runner.train()
    assert runner.iter == 10


SHARED = [loader(data(), shuffle=False), dict(dataset=Stream(), batch_size=8)]


@pytest.mark.parametrize("cfg", SHARED, ids=["samples", "stream"])
@pytest.mark.parametrize("workers", [{}, dict(num_workers=1, persistent_workers=True)], ids=str)
def test_limits_do_not_change_a_loader_that_is_also_used_elsewhere(tmp_path, cfg, workers):
    shared = build_dataloader({**cfg, **workers}, 0, "train_dataloader", training=True)
    epochs = dict(by_epoch=True, max_epochs=1)
    val = dict(val_dataloader=shared, val_cfg={}, val_evaluator="loss", limit_val_batches=1)
    limited = Runner(
        **arguments(tmp_path / "first", train_dataloader=shared, train_cfg=epochs, limit_train_batches=2)
    )
    limited.train()
    assert limited.iter == 2
    whole = Runner(**arguments(tmp_path / "second", train_dataloader=shared, train_cfg=epochs, **val))
    whole.train()
    assert whole.iter == 5
    assert_close(whole.model, by_hand(slices(5)))


def test_fast_dev_run_takes_one_batch_from_endless_datasets(tmp_path):
    runner = Runner(
        **arguments(
            tmp_path,
            train_dataloader=DataLoader(Endless(), 8),
            train_cfg=dict(by_epoch=True, max_epochs=50),
            val_dataloader=DataLoader(Endless(), 8),
            val_cfg={},
            val_evaluator="loss",
            fast_dev_run=True,
        )
    )
    runner.train()
    assert runner.iter == 1
    model = by_hand(slices(1))
    (inputs, targets) = slices(1)[0]
    expected = F.cross_entropy(model(inputs), targets).item()
    assert runner.message_hub.get_scalar("val/loss").current() == pytest.approx(expected, rel=1e-9)


def test_limited_run_on_a_stream_can_be_resumed_inside_an_epoch(tmp_path):
    def runner(epochs, **changes):
        cfg = dict(
            train_dataloader=DataLoader(Endless(), 8), train_cfg=dict(by_epoch=True, max_epochs=epochs)
        )
        hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False))
        return Runner(**arguments(tmp_path, **cfg, default_hooks=hooks, limit_train_batches=3, **changes))

    runner(1).train()
    resumed = runner(2, resume=str(tmp_path / "iter_2.pth"))
    resumed.train()
    assert resumed.iter == 6
    assert_close(resumed.model, by_hand([*slices(3), *slices(3)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(limit_train_batches=0), "limit_train_batches"),
        (dict(limit_val_batches=0.5), "limit_val_batches"),
        (
            dict(overfit_batches=2, limit_train_batches=3),
            "overfit_batches: cannot be combined with limit_train",
        ),
        (dict(fast_dev_run=True, resume=True), "fast_dev_run: cannot be combined with resume"),
        (dict(fast_dev_run=-1), "fast_dev_run"),
        (
            dict(overfit_batches=2, train_dataloader=DataLoader(Stream(), 8)),
            "^overfit_batches: does not support the loader in train_dataloader, of class DataLoader",
        ),
        (
            dict(limit_train_batches=2, train_dataloader=OwnLoader(Stream(), 8)),
            "^limit_train_batches: does not support the loader in train_dataloader, of class OwnLoader",
        ),
    ],
)
def test_options_for_short_runs_are_checked(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        Runner(**arguments(tmp_path, **changes)).train()
