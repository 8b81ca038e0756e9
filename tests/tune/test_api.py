"""`tune`, `find_batch_size` and `find_lr` on real training runs."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import slipstream
import tiny_runs
from slipstream.checkpoint import get_random_state
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.hooks import CheckpointHook, Hook, ProfilerHook
from slipstream.tune import find_batch_size, find_lr, parse_budget, tune, tune_config
from slipstream.tune.api import config_job
from slipstream.tune.jobs import ObjectsJob, RunnerJob, Setting
from slipstream.tune.lr_range import sweep_lr
from slipstream.tune.observer import Timer
from slipstream.tune.process import WARMUP, Process, TrialError


@pytest.fixture
def own():
    """Return the user's objects: a trained model, a shuffling loader, an optimizer with state, and a loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*tiny_runs.samples()), batch_size=8, shuffle=True)
    inputs, targets = next(iter(loader))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    return model, loader, optimizer, nn.functional.cross_entropy


def state(own):
    model, _, optimizer, _ = own
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.training, torch.get_rng_state()])


def assert_unchanged(before, own):
    torch.testing.assert_close(before, state(own), rtol=0, atol=0)


def test_tune_measures_options_and_leaves_the_objects_unchanged(own, short_rounds):
    before = state(own)
    rows = []
    result = slipstream.tune(*own, budget="5m", options=["fused", "precision"], report=rows.append)
    assert_unchanged(before, own)
    assert [row.label for row in rows] == ["fused", "precision=bf16"]
    for row in rows:
        assert row.status in ("adopted", "slower", "no gain", "inconclusive"), row
        assert row.estimate.low <= row.estimate.ratio <= row.estimate.high
        assert row.peak_mib > 1
    assert result.outcome.steps_per_epoch == 5
    assert (
        slipstream.accelerate(*[own[i] for i in (0, 2, 3)], speed=result.speed)(next(iter(own[1])))["loss"]
        > 0
    )


def test_a_loader_that_can_be_iterated_only_once_raises_an_error_with_the_remedy(own):
    model, loader, optimizer, loss = own
    once = (batch for batch in list(loader))
    with pytest.raises(SlipstreamError, match="can be iterated only once; pass a DataLoader or a list"):
        tune(model, once, optimizer, loss, budget=100, options=["fused"])


def test_a_model_that_cannot_train_raises_an_error_with_its_message(own):
    model, _, optimizer, loss = own
    with pytest.raises(
        SlipstreamError, match=r"training the baseline failed \(failed\): RuntimeError: .*shape"
    ):
        tune(model, [(torch.zeros(2, 7), torch.zeros(2).long())], optimizer, loss, budget=100)


def test_error_for_prefetch_names_its_counterpart_for_a_custom_loop(own):
    with pytest.raises(ConfigError, match=r"use feed\(loader, prefetch=2\)"):
        tune(*own, options=["prefetch"])


def test_finding_the_batch_size_leaves_the_users_objects_unchanged(own):
    before = state(own)
    found = find_batch_size(*own, max_batch_size=4, budget=60)
    assert_unchanged(before, own)
    assert found.largest == 4
    assert [row.status for row in found.rows] == ["failed", "fits", "fits"]  # BatchNorm requires two samples


def test_batch_size_finder_requires_a_loader_that_can_be_rebuilt(own):
    model, loader, optimizer, loss = own
    with pytest.raises(
        SlipstreamError, match="must be a torch DataLoader with a map-style dataset, not list"
    ):
        find_batch_size(model, list(loader), optimizer, loss, max_batch_size=2)


def test_lr_sweep_increases_the_rate_and_leaves_the_objects_unchanged(own):
    before = state(own)
    found = find_lr(*own, start=1e-6, end=100.0, steps=30, budget=60)
    assert_unchanged(before, own)
    assert 10 <= len(found.rates) <= 30
    assert found.rates[0] == pytest.approx(1e-6)
    assert len(found.losses) == len(found.rates)
    assert max(found.losses) > 2 * min(found.losses)  # training diverges at a learning rate of 100


class Diverging(tiny_runs.Net):
    """A model whose loss is NaN from the tenth step on. A Runner logs the tenth step."""

    steps = 0

    def forward(self, inputs, targets, mode):
        self.steps += 1
        return {
            name: loss if self.steps < 10 else loss * float("nan")
            for name, loss in super().forward(inputs, targets, mode).items()
        }


def test_lr_sweep_of_a_runner_ends_at_a_loss_that_is_not_finite(tmp_path):
    cfg = tiny_runs.training(tmp_path, model=dict(type=Diverging), log_level="INFO")
    found = sweep_lr(config_job(cfg), 1e-7, 1e-6, 30, 60)
    assert len(found.losses) == 10
    assert math.isnan(found.losses[-1])


def test_tune_config_measures_a_runner(tmp_path, short_rounds):
    cfg = tiny_runs.training(tmp_path / "never", **tiny_runs.validation())
    result = tune_config(cfg, 300, ["num_workers", "fused"])
    rows = {row.label.partition("=")[0]: row for row in result.rows}
    assert rows["fused"].status in ("adopted", "slower", "no gain", "inconclusive")
    # The sample order and the augmentation do not depend on the number of workers.
    assert rows["num_workers"].loss_difference == (0.0, 0.0)
    assert result.outcome.steps_per_epoch == 5
    assert not (tmp_path / "never").exists()


def test_a_trial_keeps_the_hooks_that_change_steps_and_removes_those_that_write_files(tmp_path):
    hooks = [
        dict(type="EMAHook"),
        dict(type="CheckpointHook", interval=1),
        CheckpointHook(out_dir=str(tmp_path / "elsewhere")),
        dict(type=ProfilerHook),
    ]
    own = dict(second=dict(type="CheckpointHook", by_epoch=False), timer=dict(type="IterTimerHook"))
    cfg = tiny_runs.training(tmp_path, custom_hooks=hooks, default_hooks=own)
    trial = RunnerJob(cfg, Setting({"fused": True}, num_workers=2, batch_size=4)).trial_config(tmp_path)
    assert trial.custom_hooks == [dict(type="EMAHook")]
    assert trial.default_hooks == {
        "second": None,
        "timer": dict(type="IterTimerHook"),
        "checkpoint": None,
        "preemption": None,
        "report": None,
    }
    assert trial.speed == {"fused": True}
    loader = trial.train_dataloader
    assert (loader.num_workers, loader.batch_size, loader.persistent_workers) == (2, 4, True)
    assert cfg["train_dataloader"]["batch_size"] == 8


def test_trials_start_from_the_same_weights_even_without_a_seed(tmp_path):
    cfg = tiny_runs.training(tmp_path, randomness=None)
    losses = []
    for _ in range(2):
        with Process(RunnerJob(cfg)) as process:
            losses.append(process.wait_for("warm", 60)["losses"])
    assert losses[0] == losses[1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(*tiny_runs.samples()))


@pytest.mark.parametrize("dataset", [Stream(), dict(type=Stream)], ids=["object", "configuration"])
def test_a_streamed_dataset_is_measured_without_a_batch_limit(tmp_path, dataset):
    loader = dict(batch_size=8, dataset=dataset, collate_fn=dict(type="default_collate"))
    cfg = tiny_runs.training(tmp_path, train_dataloader=loader, train_cfg=dict(by_epoch=False, max_iters=2))
    with Process(RunnerJob(cfg)) as process:
        assert len(process.wait_for("warm", 60)["losses"]) == WARMUP
        assert process.time(3, 1, 60)["seconds"] > 0


class BatchLength(tiny_runs.Net):
    """A model whose loss is the number of samples in the batch."""

    def forward(self, inputs, targets, mode):
        return {"loss": 0 * super().forward(inputs, targets, mode)["loss"] + len(inputs)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, dict(drop_last=True), dict(num_batch_per_epoch=1)])
def test_all_batches_of_the_batch_size_finder_have_the_tried_size(tmp_path, options, workers):
    loader = tiny_runs.loader(tiny_runs.Noisy(), num_workers=workers, **options)  # 40 samples
    cfg = tiny_runs.training(tmp_path, model=dict(type=BatchLength), train_dataloader=loader)
    for size in (32, 100):
        with Process(RunnerJob(cfg, Setting(batch_size=size)), partial(Timer, warmup=4)) as process:
            assert process.wait_for("warm", 60)["losses"] == [size] * 4


def test_all_streamed_batches_of_the_batch_size_finder_have_the_tried_size(tmp_path):
    loader = dict(batch_size=8, dataset=Stream(), collate_fn=dict(type="default_collate"))
    cfg = tiny_runs.training(tmp_path, model=dict(type=BatchLength), train_dataloader=loader)
    with Process(RunnerJob(cfg, Setting(batch_size=32)), partial(Timer, warmup=4)) as process:
        assert process.wait_for("warm", 60)["losses"] == [32] * 4
    with Process(RunnerJob(cfg, Setting(batch_size=64))) as process, pytest.raises(TrialError) as caught:
        process.wait_for("warm", 20)
    assert "ended after 0 of 1 batches" in caught.value.reason


class Recorder(Hook):
    """Writes the inputs of all batches to a file, and counts the passes over the loader."""

    def __init__(self, path):
        self.path, self.inputs, self.epochs = path, [], 0

    def before_train_epoch(self, runner):
        self.epochs += 1

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.inputs.append(data_batch[0].clone())
        torch.save([self.epochs, self.inputs], self.path)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "length", [dict(by_epoch=True, max_epochs=1), dict(by_epoch=False, max_iters=3)], ids=["epochs", "iters"]
)
def test_a_trial_can_be_longer_than_the_run_and_repeats_the_first_batches(tmp_path, length, workers):
    loader = tiny_runs.loader(tiny_runs.Noisy(80), num_workers=workers)
    hooks = [Recorder(tmp_path / "seen.pt")]
    cfg = tiny_runs.training(tmp_path, train_dataloader=loader, train_cfg=length, custom_hooks=hooks)
    with Process(RunnerJob(cfg)) as process:
        assert process.wait_for("warm", 60)["steps_per_epoch"] == 10
        process.time(20, 1, 60)
    epochs, inputs = torch.load(tmp_path / "seen.pt")
    assert epochs == 1
    assert len(inputs) == 27
    for number, batch in enumerate(inputs[6:]):
        assert torch.equal(batch, inputs[number % 6])  # the augmentation is also repeated
    assert len({float(batch.sum()) for batch in inputs}) == 6


def test_persistent_workers_of_this_process_remain_usable(own):
    model, loader, optimizer, loss = own
    persistent = DataLoader(loader.dataset, batch_size=8, num_workers=1, persistent_workers=True)
    expected = torch.cat([targets for _, targets in persistent])
    with Process(ObjectsJob(model, persistent, optimizer, loss, None, get_random_state())) as process:
        assert len(process.wait_for("warm", 60)["losses"]) == WARMUP
    assert torch.equal(torch.cat([targets for _, targets in persistent]), expected)


def test_a_configuration_without_training_is_rejected():
    with pytest.raises(
        ConfigError, match="train_dataloader: is required, because training steps are measured"
    ):
        tune_config({"model": dict(type=tiny_runs.Net)})


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("90s", 90), ("1h30m", 5400), ("45", 45), (2.5, 2.5), ("1.5m", 90)]
)
def test_budgets_are_read(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minutes", "-3", 0, "m", True, None, "nan", float("inf")])
def test_invalid_budgets_are_rejected(text):
    with pytest.raises(ConfigError, match="budget: must be a duration such as 5m"):
        parse_budget(text)
