"""Tests of speed options in a Runner."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook, GcHook, Hook, NanGuardHook
from slipstream.model import MMDistributedDataParallel
from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.runner import Runner
from slipstream.speed import SpeedPlan
from slipstream.speed.apply import plan_optim, prepare_model
from tiny_runs import Net, assert_same, run, training, validation, weights


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


def test_plan_error_is_raised_before_any_file_is_written(tmp_path):
    with pytest.raises(
        ConfigError, match=r"optim_wrapper.accumulative_counts: 3 conflicts with speed.accumulate=2"
    ):
        Runner(
            **training(
                tmp_path / "run",
                optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=3),
                speed=dict(accumulate=2),
            )
        )
    assert not (tmp_path / "run").exists()


def test_unsupported_plan_is_rejected_at_construction(tmp_path):
    with pytest.raises(ConfigError, match=r"^speed.cuda_graph: "):
        Runner(**training(tmp_path, speed=dict(cuda_graph=True, compile=dict(scope="model"))))


def test_auto_selects_options_and_trains(tmp_path):
    runner = run(tmp_path, speed="auto")
    assert runner.iter == 10
    assert runner.speed.sources["fused"].startswith("auto: ")
    assert runner.optim_wrapper.param_groups[0]["fused"] is True


def test_log_lists_options_sources_and_options_without_effect(tmp_path):
    speed = dict(auto=True, sync_bn=True)
    runner = Runner(**training(tmp_path, speed=speed, log_level="INFO"))
    (log,) = Path(runner.log_dir).glob("*.log")
    text = log.read_text()
    assert "Options: sync_bn (speed.sync_bn), fused (auto: " in text
    assert (
        "speed.sync_bn has no effect here: a single process already normalizes over the whole batch" in text
    )


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


def test_plan_sets_accumulation_and_clipping_of_the_wrapper(tmp_path):
    speed = dict(accumulate=2, clip_grad=dict(max_norm=0.01))
    runner = run(tmp_path / "a", speed=speed)
    written = run(
        tmp_path / "b",
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2, clip_grad=dict(max_norm=0.01)
        ),
    )
    assert_same(weights(runner), weights(written))
    assert runner.optim_wrapper.accumulative_counts == 2
    assert not torch.equal(run(tmp_path / "c").model.first.weight, runner.model.first.weight)


def test_plain_optimizer_is_wrapped_according_to_the_plan(tmp_path):
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    runner = run(tmp_path, model=model, optim_wrapper=optimizer, speed=dict(accumulate=5, precision="bf16"))
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    assert runner.optim_wrapper.optimizer is optimizer
    assert runner.optim_wrapper.accumulative_counts == 5


@pytest.mark.parametrize(
    "speed", [dict(precision="bf16"), dict(accumulate=2), dict(clip_grad=dict(max_norm=1.0))]
)
def test_plan_that_contradicts_an_existing_wrapper_is_rejected(tmp_path, speed):
    def ready():
        return OptimWrapper(SGD(nn.Linear(1, 1).parameters(), lr=0.1))

    word = next(iter(speed))
    for wrapper in (ready(), dict(one=ready()), dict(type=Plain, optimizer=dict(type="SGD", lr=0.1))):
        with pytest.raises(
            ConfigError, match=rf"^optim_wrapper: speed.{word} cannot change an existing"
        ) as caught:
            Runner(**training(tmp_path, optim_wrapper=wrapper, speed=speed))
        has_type = isinstance(wrapper, dict) and "type" in wrapper
        assert ("the key 'optimizer'" in str(caught.value)) is isinstance(wrapper, OptimWrapper)
        assert ("remove the 'type' key" in str(caught.value)) is has_type
        assert ("pass dtype='bfloat16' to AmpOptimWrapper" in str(caught.value)) is (word == "precision")


def test_existing_wrapper_that_matches_the_plan_is_accepted():
    wrapper = AmpOptimWrapper(
        optimizer=SGD(Net().parameters(), lr=0.1), dtype="bfloat16", accumulative_counts=2
    )
    plan = SpeedPlan.read(dict(precision="bf16", accumulate=2), optim_wrapper=wrapper)
    assert plan_optim(wrapper, plan, torch.device("cpu")) is wrapper


def test_fused_is_rejected_for_optimizers_without_a_fused_kernel(tmp_path):
    adadelta = dict(optimizer=dict(type="Adadelta", lr=0.1))
    with pytest.raises(ConfigError, match=r"^speed.fused: Adadelta has no fused kernel"):
        run(tmp_path, optim_wrapper=adadelta, speed=dict(fused=True))
    assert run(tmp_path, optim_wrapper=adadelta, speed="auto").iter == 10


# ---- the model ------------------------------------------------------------------------------------------------


def test_channels_last_converts_the_model(tmp_path):
    model = nn.Sequential(nn.Conv2d(4, 5, 3))
    prepared = prepare_model(model, SpeedPlan.read(dict(channels_last=True)), torch.device("cpu"))
    assert prepared is model
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_activation_checkpointing_recomputes_the_named_modules(tmp_path):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.dropout = Counter()

    class Counter(nn.Module):
        calls = 0

        def forward(self, x):
            Counter.calls += 1
            return x.tanh()

    plain = run(tmp_path / "a", model=dict(type=Counting))
    assert Counter.calls == 10
    checkpointed = run(
        tmp_path / "b", model=dict(type=Counting), cfg=dict(activation_checkpointing=["dropout"])
    )
    assert Counter.calls == 30
    assert_same(weights(plain), weights(checkpointed))


def test_unknown_module_name_error_contains_the_config_path(tmp_path):
    with pytest.raises(ConfigError, match=r"^speed.activation_checkpointing.modules: .*'firts'.*'first'"):
        Runner(**training(tmp_path, speed=dict(activation_checkpointing=["firts"])))


@pytest.mark.parametrize("option", ["sync_bn", "channels_last", "activation_checkpointing"])
def test_wrapped_model_rejects_options_for_its_layers(option):
    # The constructor requires a process group.
    wrapped = MMDistributedDataParallel.__new__(MMDistributedDataParallel)
    nn.Module.__init__(wrapped)
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match=rf"^speed.{option}: the model is already wrapped in MMDistributed"):
        prepare_model(wrapped, SpeedPlan.read({option: True}), device)
    assert prepare_model(wrapped, SpeedPlan(), device) is wrapped


# ---- hooks and switches -----------------------------------------------------------------------------------------


def test_ema_option_registers_its_hook(tmp_path):
    runner = run(tmp_path, speed=dict(ema=dict(decay=0.9, type="constant")))
    average = hook_of(runner, EMAHook).ema_model
    assert average.steps == 10
    for name, value in average.module.named_parameters():
        assert not torch.equal(value, dict(runner.model.named_parameters())[name])
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    assert torch.equal(saved["state_dict"]["first.weight"], average.module.first.weight)


def test_user_ema_hook_is_not_duplicated(tmp_path):
    hooks = [dict(type="EMAHook", momentum=0.1)]
    runner = Runner(**training(tmp_path, custom_hooks=hooks))
    assert hook_of(runner, EMAHook)


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


class Switches(Hook):
    def __init__(self):
        self.seen = set()

    def after_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.add(torch.backends.cudnn.benchmark)

    after_train_iter = after_val_iter = after_iter


@pytest.mark.parametrize(
    ("words", "on"),
    [
        (dict(speed=dict(cudnn_benchmark=True)), True),
        (dict(env_cfg=dict(cudnn_benchmark=True)), True),
        (dict(), False),
        (dict(env_cfg=dict(cudnn_benchmark=True), randomness=dict(seed=1, deterministic=True)), False),
    ],
)
def test_cudnn_benchmark_is_enabled_only_during_the_run(tmp_path, words, on):
    hook = Switches()
    run(tmp_path, custom_hooks=[hook], **validation(), **words)
    assert hook.seen == {on}
    assert not torch.backends.cudnn.benchmark


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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            dict(max_epochs=3),
            r"training_params\.max_epochs: a Runner supports only the speed options .*slipstream\.Trainer",
        ),
        (dict(batch_acumulate=2), r"training_params\.batch_acumulate: .*did you mean 'batch_accumulate'"),
        ("fast", r"training_params: must be a dict, not 'fast'"),
    ],
)
def test_unsupported_training_params_are_rejected(tmp_path, params, message):
    with pytest.raises(ConfigError, match=message):
        Runner(**training(tmp_path), cfg=dict(training_params=params))
