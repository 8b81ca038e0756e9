"""Tests of speed options in a Runner."""

import gc

import pytest
import torch
from torch import nn

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook, GcHook, Hook, NanGuardHook
from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.runner import Runner
from tiny_runs import Net, assert_same, run, training, weights


def hook_of(runner, kind):
    (found,) = (hook for hook in runner.hooks if isinstance(hook, kind))
    return found


class Plain(OptimWrapper):
    pass


# ---- front ends ---------------------------------------------------------------------------------------------


def test_speed_is_an_argument_and_a_config_key(tmp_path):
    words = dict(accumulate=2)
    given = training(tmp_path)
    assert Runner(**given, speed=words).speed.accumulate == 2
    assert Runner(**given, cfg=dict(speed=words)).speed.accumulate == 2
    from_cfg = Runner.from_cfg(Config(dict(given, speed=words)))
    assert from_cfg.speed.accumulate == 2
    assert from_cfg.speed.sources == {"accumulate": "speed.accumulate"}
    assert Runner(**given, cfg=dict(speed=words), speed={}).speed.accumulate == 1


def test_auto_selects_options_and_trains(tmp_path):
    runner = run(tmp_path, speed="auto")
    assert runner.iter == 10
    assert runner.speed.sources["fused"].startswith("auto: ")
    assert runner.optim_wrapper.param_groups[0]["fused"] is True


# ---- the optimizer wrapper --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapper", [{}, dict(type="OptimWrapper"), dict(type="AmpOptimWrapper", dtype="bfloat16")]
)
def test_precision_creates_a_mixed_precision_wrapper(tmp_path, wrapper):
    sgd = dict(optimizer=dict(type="SGD", lr=0.1))
    runner = run(tmp_path / "a", speed=dict(precision="bf16"), optim_wrapper={**wrapper, **sgd})
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    assert runner.optim_wrapper.dtype == torch.bfloat16
    written = run(tmp_path / "b", optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16", **sgd))
    assert_same(weights(runner), weights(written))
    plain = run(tmp_path / "c")
    assert not torch.equal(plain.model.first.weight, runner.model.first.weight)


# ---- the model ------------------------------------------------------------------------------------------------


def test_activation_checkpointing_recomputes_the_named_modules(tmp_path):
    calls = []  # a recomputation restores attributes, also of classes

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.dropout = Counter()

    class Counter(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x.tanh()

    plain = run(tmp_path / "a", model=dict(type=Counting))
    assert len(calls) == 10
    checkpointed = run(
        tmp_path / "b", model=dict(type=Counting), cfg=dict(activation_checkpointing=["dropout"])
    )
    assert len(calls) == 30
    assert_same(weights(plain), weights(checkpointed))


# ---- hooks and switches -----------------------------------------------------------------------------------------


def test_ema_option_registers_its_hook(tmp_path):
    runner = run(tmp_path, speed=dict(ema=dict(decay=0.9, type="constant")))
    average = hook_of(runner, EMAHook).ema_model
    assert average.steps == 10
    for name, value in average.module.named_parameters():
        assert not torch.equal(value, dict(runner.model.named_parameters())[name])
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    assert torch.equal(saved["state_dict"]["first.weight"], average.module.first.weight)


def test_nan_guard_and_gc_hooks_are_registered_and_restore_state(tmp_path):
    runner = run(tmp_path, speed=dict(nan_guard="skip", gc=3))
    assert hook_of(runner, NanGuardHook).options.action == "skip"
    assert hook_of(runner, GcHook).interval == 3
    assert gc.isenabled()


def test_garbage_collector_is_restored_after_a_failure(tmp_path):
    class Fails(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            assert gc.isenabled() == (runner.iter <= 10)  # the warm-up ends after the eleventh step
            if runner.iter == 14:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(
            tmp_path,
            train_cfg=dict(by_epoch=True, max_epochs=4),
            speed=dict(gc=100),
            custom_hooks=[Fails()],
        )
    assert gc.isenabled()


# ---- SuperGradients' training_params in a Runner's configuration -------------------------------------------------


def test_training_params_can_contain_speed_options(tmp_path):
    cfg = Config(dict(training_params=dict(ema=True, batch_accumulate=2, speed=dict(gc=3))))
    runner = Runner(**training(tmp_path), cfg=cfg)
    assert (runner.speed.accumulate, runner.speed.gc) == (2, 3)
    assert any(isinstance(hook, EMAHook) for hook in runner.hooks)
    with pytest.raises(
        ConfigError, match=r"training_params\.batch_accumulate: 2 conflicts with speed\.accumulate=4"
    ):
        Runner(**training(tmp_path), cfg=cfg, speed=dict(accumulate=4))
