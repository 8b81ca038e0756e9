"""Tests of custom loops and hooks, options of the Runner, and repeated calls to its methods."""

import pytest
import torch
from torch.utils.data import TensorDataset

from slipstream.hooks import Hook
from slipstream.registry import HOOKS, LOOPS
from slipstream.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from tiny_runs import Net, Scripted, assert_same, loader, run, training, validation, weights


def small(count=8, **options):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    return loader(TensorDataset(inputs, torch.arange(count) % 3), batch_size=8, **options)


def test_custom_loops_are_found_by_name(tmp_path):
    @LOOPS.register_module(force=True)
    class HalvedIterLoop(IterBasedTrainLoop):
        def __init__(self, runner, dataloader, max_iters):
            super().__init__(runner, dataloader, max_iters // 2)

    runner = Runner(**training(tmp_path, train_cfg=dict(type="HalvedIterLoop", max_iters=8)))
    assert not runner.by_epoch
    runner.train()
    assert not runner.by_epoch
    assert runner.iter == 4
    assert [p.name for p in tmp_path.glob("*.pth")] == ["iter_4.pth"]
    epochs = run(tmp_path / "e", train_cfg=dict(type=EpochBasedTrainLoop, max_epochs=1))
    assert epochs.iter == 5


def test_custom_hooks_are_found_by_name(tmp_path):
    @HOOKS.register_module(force=True)
    class Counting(Hook):
        def __init__(self, start):
            self.count = start

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            self.count += 1

    runner = run(tmp_path, custom_hooks=[dict(type="Counting", start=100)])
    assert next(hook.count for hook in runner.hooks if isinstance(hook, Counting)) == 110


def test_auto_scale_lr_scales_the_rate_by_batch_size_over_base_batch_size(tmp_path):
    options = dict(
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.1),
            paramwise_cfg=dict(custom_keys={"first": dict(lr_mult=0.1)}),
        )
    )
    scaled = run(tmp_path / "a", **options, auto_scale_lr=dict(enable=True, base_batch_size=32))
    assert sorted(g["lr"] for g in scaled.optim_wrapper.param_groups) == [
        pytest.approx(0.0025),
        pytest.approx(0.025),
    ]
    off = run(tmp_path / "b", **options, auto_scale_lr=dict(enable=False, base_batch_size=32))
    assert sorted(g["lr"] for g in off.optim_wrapper.param_groups) == [
        pytest.approx(0.01),
        pytest.approx(0.1),
    ]


def test_training_and_validation_use_the_compiled_model(tmp_path):
    graphs = []

    def backend(graph, inputs):
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    changes = dict(model=dict(type=Net, norm=True), **validation())
    compiled = run(tmp_path / "a", **changes, cfg=dict(compile=dict(backend=backend)))
    assert True in graphs  # calls in training
    assert False in graphs  # calls in validation
    plain = run(tmp_path / "b", **changes)
    assert weights(compiled).keys() == weights(plain).keys()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[name], value)
    run(tmp_path / "c", **changes, cfg=dict(compile=dict(backend="eager")))


def test_one_runner_can_train_validate_and_test(tmp_path):
    runner = Runner(**training(tmp_path, **validation(Scripted([0.1, 0.2, 0.3]))))
    runner.train()
    before = weights(runner)
    assert runner.val() == {"acc": 0.3}
    assert_same(before, weights(runner))
