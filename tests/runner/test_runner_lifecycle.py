"""Tests of the stages, hooks and output files of a run."""

from typing import ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.hooks import Hook
from slipstream.runner import Runner
from tiny_runs import Accuracy, Net, assert_same, loader, run, training, validation, weights


class Recorder(Hook):
    """A hook that records every stage at which it is called."""

    def __init__(self):
        self.stages = []

    def __getattribute__(self, name):
        if name in Hook.stages:
            return lambda runner, **_: self.stages.append(name)
        return super().__getattribute__(name)


TRAIN_STEP = ["before_train_iter", "after_train_iter"]
VALIDATION = [
    "before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val",
]  # fmt: skip


def small(count=8, **options):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    return loader(TensorDataset(inputs, torch.arange(count) % 3), batch_size=8, **options)


def test_training_with_validation_runs_the_documented_stages(tmp_path):
    recorder = Recorder()
    run(
        tmp_path,
        train_dataloader=small(16),
        val_dataloader=small(),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
        custom_hooks=[recorder],
    )
    # A hook with NORMAL priority runs before the CheckpointHook.
    epoch = ["before_train_epoch", *TRAIN_STEP * 2, "after_train_epoch", "before_save_checkpoint"]
    assert recorder.stages == [
        "before_run", "before_train", *(epoch + VALIDATION) * 2, "after_train", "after_run",
    ]  # fmt: skip


def test_testing_and_loading_run_the_documented_stages(tmp_path):
    run(tmp_path)
    recorder = Recorder()
    runner = Runner(
        **training(
            tmp_path,
            load_from=str(tmp_path / "epoch_2.pth"),
            test_dataloader=small(),
            test_cfg=dict(),
            test_evaluator=dict(type=Accuracy),
            custom_hooks=[recorder],
        )
    )
    runner.test()
    assert recorder.stages == [
        "before_run", "after_load_checkpoint", "before_test", "before_test_epoch", "before_test_iter",
        "after_test_iter", "after_test_epoch", "after_test", "after_run",
    ]  # fmt: skip


def test_iteration_based_training_counts_as_one_epoch_for_hooks(tmp_path):
    recorder = Recorder()
    cfg = dict(by_epoch=False, max_iters=3, val_interval=2)
    runner = run(
        tmp_path,
        train_dataloader=small(16),
        train_cfg=cfg,
        default_hooks=dict(checkpoint=dict(type="CheckpointHook")),
        custom_hooks=[recorder],
        **validation(),
    )
    vals = 5 * ["before_val_iter", "after_val_iter"]
    val = [*VALIDATION[:2], *vals, *VALIDATION[4:]]
    assert recorder.stages == [
        "before_run", "before_train", "before_train_epoch", *TRAIN_STEP * 2, *val, *TRAIN_STEP,
        "before_save_checkpoint", *val, "after_train_epoch", "after_train", "after_run",
    ]  # fmt: skip
    assert (runner.iter, runner.epoch, runner.max_epochs, runner.by_epoch) == (3, 1, 1, False)


class Named(Hook):
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def before_train(self, runner):
        self.calls.append(self.name)


def test_hooks_run_by_priority_then_by_registration(tmp_path):
    calls = []
    hooks = [Named(name, calls) for name in "abc"]
    hooks += [
        dict(type=Named, name="late", calls=calls, priority="LOWEST"),
        dict(type=Named, name="early", calls=calls, priority="VERY_HIGH"),
        dict(type=Named, name="low", calls=calls, priority=70),
    ]
    runner = Runner(**training(tmp_path, custom_hooks=hooks))
    runner.register_hook(Named("first", calls), priority="HIGHEST")
    runner.train()
    assert calls == ["first", "early", "a", "b", "c", "low", "late"]
    kinds = [type(hook).__name__ for hook in runner.hooks]
    assert kinds == [
        "Named", "RuntimeInfoHook", "Named", "IterTimerHook", "ClassCountHook", "DistSamplerSeedHook", "Named", "Named",
        "Named", "LoggerHook", "ParamSchedulerHook", "Named", "CheckpointHook", "ReportHook", "Named", "PreemptionHook",
    ]  # fmt: skip


def test_default_hooks_can_be_removed_and_replaced(tmp_path):
    hooks = dict(checkpoint=None, timer=None, logger=dict(type="LoggerHook", interval=3))
    runner = run(tmp_path, default_hooks=hooks)
    kinds = [type(hook).__name__ for hook in runner.hooks]
    assert kinds == [
        "RuntimeInfoHook", "ClassCountHook", "DistSamplerSeedHook", "LoggerHook", "ParamSchedulerHook",
        "ReportHook", "PreemptionHook",
    ]  # fmt: skip
    assert runner.hooks[3].interval == 3
    assert list(tmp_path.glob("*.pth")) == []


def test_default_hook_without_type_changes_only_the_given_arguments(tmp_path):
    hooks = dict(logger=dict(interval=3), checkpoint=dict(interval=5))
    runner = run(tmp_path, default_hooks=hooks)
    found = {type(hook).__name__: hook for hook in runner.hooks}
    assert found["LoggerHook"].interval == 3
    assert (found["CheckpointHook"].interval, found["CheckpointHook"].max_keep_ckpts) == (5, 2)


def test_general_hook_methods_apply_to_modes_that_are_not_overridden(tmp_path):
    calls = []

    class General(Hook):
        def _before_iter(self, runner, batch_idx, data_batch=None, mode="train"):
            calls.append(f"before {mode} {batch_idx}")

        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            calls.append("own")

        def _after_iter(self, runner, batch_idx, data_batch=None, outputs=None, mode="train"):
            calls.append(f"after {mode}")

        def _after_epoch(self, runner, mode="train"):
            calls.append(f"epoch {mode}")

    cfg = dict(train_cfg=dict(by_epoch=True, max_epochs=1), val_dataloader=small(), val_cfg=dict())
    run(tmp_path, train_dataloader=small(), val_evaluator=Accuracy(), custom_hooks=[General()], **cfg)
    assert calls == ["before train 0", "after train", "epoch train", "before val 0", "own", "epoch val"]


@pytest.mark.parametrize(
    ("cfg", "validated"),
    [
        (dict(max_epochs=5), [1, 2, 3, 4, 5]),
        (dict(max_epochs=5, val_interval=2), [2, 4, 5]),
        (dict(max_epochs=5, val_begin=3), [3, 4, 5]),
        (dict(max_epochs=6, val_interval=4, dynamic_intervals=[(5, 1)]), [4, 5, 6]),
    ],
)
def test_epoch_based_training_follows_the_validation_schedule(tmp_path, cfg, validated):
    at = []

    class Watch(Hook):
        def before_val(self, runner):
            at.append(runner.epoch)

    run(
        tmp_path,
        train_dataloader=small(),
        train_cfg=dict(by_epoch=True, **cfg),
        **validation(),
        custom_hooks=[Watch()],
    )
    assert at == validated


@pytest.mark.parametrize(
    ("cfg", "validated"),
    [
        (dict(val_interval=4), [4, 8, 10]),
        (dict(val_interval=4, val_begin=5), [8, 10]),
        (dict(val_interval=5, dynamic_intervals=[(6, 2), (9, 1)]), [5, 6, 8, 9, 10]),
    ],
)
def test_iteration_based_training_follows_the_validation_schedule(tmp_path, cfg, validated):
    at = []

    class Watch(Hook):
        def before_val(self, runner):
            at.append(runner.iter)

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            assert runner.model.training

        def before_val_iter(self, runner, batch_idx, data_batch=None):
            assert not runner.model.training

    cfg = dict(by_epoch=False, max_iters=10, **cfg)
    run(tmp_path, train_dataloader=small(16), train_cfg=cfg, **validation(), custom_hooks=[Watch()])
    assert at == validated


def test_run_writes_the_documented_files(tmp_path):
    cfg = Config(
        training(
            tmp_path,
            model=dict(type="Classifier", network=dict(type="Linear", in_features=4, out_features=3)),
            train_dataloader=dict(batch_size=20, dataset=dict(type="FilesOfARun")),
            default_hooks=dict(logger=dict(type="LoggerHook", interval=2)),
        )
    )
    from slipstream.registry import DATASETS

    class FilesOfARun(torch.utils.data.Dataset):
        metainfo: ClassVar = dict(classes=("a", "b", "c"))

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"inputs": torch.full((4,), index / 40), "targets": torch.tensor(index % 3)}

    DATASETS.register_module(module=FilesOfARun, force=True)
    runner = Runner.from_cfg(cfg)
    runner.train()
    stamp = runner.timestamp
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {
        ".lock", ".last_run", "epoch_1.pth", "epoch_2.pth", "last_checkpoint", f"{stamp}.py", f"{stamp}/{stamp}.log",
        f"{stamp}/vis_data/config.py", f"{stamp}/vis_data/scalars.json", f"{stamp}/vis_data/{stamp}.json",
        f"{stamp}/report.json", f"{stamp}/report.html",
    }  # fmt: skip
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_2.pth")
    assert Config.fromfile(tmp_path / f"{stamp}.py").train_cfg == dict(by_epoch=True, max_epochs=2)
    checkpoint = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    entries = {"meta", "state_dict", "message_hub", "optimizer", "batches", "unfinished", "windows"}
    assert checkpoint.keys() == entries | {"param_schedulers"}
    meta = checkpoint["meta"]
    assert (meta["epoch"], meta["iter"], meta["seed"]) == (2, 4, 3)
    assert meta["experiment_name"] == runner.experiment_name
    assert meta["dataset_meta"] == {"classes": ("a", "b", "c")}
    assert "max_epochs: 2" in meta["cfg"]
    assert_same(checkpoint["state_dict"], weights(runner))


def test_validation_and_testing_use_the_loaded_weights(tmp_path):
    trained = run(tmp_path / "a", train_cfg=dict(by_epoch=True, max_epochs=8))
    inputs, targets = (t for t in trained.train_dataloader.dataset.tensors)
    trained.model.eval()
    expected = (trained.model(inputs, targets, "tensor").argmax(1) == targets).float().mean().item()
    evaluation = validation()
    runner = Runner(
        model=Net(),
        work_dir=tmp_path / "b",
        load_from=tmp_path / "a" / "epoch_8.pth",
        log_level="ERROR",
        **evaluation,
        **{name.replace("val", "test", 1): value for name, value in evaluation.items() if "eval" not in name},
        test_evaluator=[dict(type=Accuracy), dict(type=Accuracy, prefix="second")],
    )
    assert runner.val()["acc"] == pytest.approx(expected)
    assert runner.test() == {"acc": pytest.approx(expected), "second/acc": pytest.approx(expected)}
    with pytest.raises(ConfigError, match="requires train_dataloader, train_cfg and optim_wrapper"):
        runner.train()


def test_init_weights_runs_once_and_not_after_loading(tmp_path):
    class Zeroing(Net):
        def init_weights(self):
            with torch.no_grad():
                self.last.weight.zero_()

    still = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)))
    fresh = run(tmp_path / "a", model=dict(type=Zeroing), **still)
    assert not fresh.model.last.weight.any()
    other = run(tmp_path / "b")
    loaded = Runner(
        **training(
            tmp_path / "c",
            model=dict(type=Zeroing),
            load_from=tmp_path / "b" / "epoch_2.pth",
            **validation(),
            **still,
        )
    )
    loaded.val()
    loaded.train()
    assert_same(weights(loaded), weights(other))
