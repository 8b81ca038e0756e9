"""Tests of MMEngine and SuperGradients keys, and of conflicts between two front ends."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.optim import AmpOptimWrapper
from slipstream.speed import CompileOptions, SpeedPlan

SGD = dict(type="SGD", lr=0.1)


def optimizer():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


# ---- MMEngine ------------------------------------------------------------------------------------------


def test_mmengine_keys_are_read():
    cfg = Config(
        dict(
            compile=dict(backend="eager", dynamic=False),
            sync_bn="torch",
            model_wrapper_cfg=dict(type="MMDistributedDataParallel", static_graph=True),
            find_unused_parameters=True,
            activation_checkpointing=["layer1"],
        )
    )
    wrapper = dict(type="OptimWrapper", optimizer=SGD, accumulative_counts=2, clip_grad=dict(max_norm=3))
    plan = SpeedPlan.read(cfg=cfg, optim_wrapper=wrapper, env_cfg=dict(cudnn_benchmark=True))
    assert plan.compile == CompileOptions("eager", dynamic=False)
    assert plan.sync_bn is plan.find_unused_parameters is plan.cudnn_benchmark is True
    assert plan.parallel.kind == "ddp"
    assert plan.parallel.wrapper == {"type": "MMDistributedDataParallel", "static_graph": True}
    assert plan.activation_checkpointing.modules == ["layer1"]
    assert (plan.accumulate, plan.clip_grad.max_norm) == (2, 3)
    assert plan.precision is None
    assert plan.sources == {
        "compile": "compile",
        "sync_bn": "sync_bn",
        "parallel": "model_wrapper_cfg",
        "find_unused_parameters": "find_unused_parameters",
        "accumulate": "optim_wrapper.accumulative_counts",
        "clip_grad": "optim_wrapper.clip_grad",
        "activation_checkpointing": "activation_checkpointing",
        "cudnn_benchmark": "env_cfg.cudnn_benchmark",
    }


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [
        ("bfloat16", "cpu", "bf16"),
        ("float16", "cpu", "fp16"),
        (torch.bfloat16, "cuda", "bf16"),
        (None, "cpu", "bf16"),
        (None, "cuda", "fp16"),
    ],
)
@pytest.mark.parametrize("kind", ["AmpOptimWrapper", "mmengine.AmpOptimWrapper", AmpOptimWrapper])
def test_amp_optim_wrapper_sets_precision(dtype, device, precision, kind):
    wrapper = dict(type=kind, optimizer=SGD, dtype=dtype)
    assert SpeedPlan.read(optim_wrapper=wrapper, device=device).precision == precision


class Mine(DistributedDataParallel):
    pass


@pytest.mark.parametrize(
    ("cfg", "kind", "wrapper"),
    [
        (dict(parallel="ddp"), "ddp", {}),
        (dict(parallel=dict(type="ddp", static_graph=True)), "ddp", {"static_graph": True}),
        (dict(parallel="fsdp2"), "fsdp2", {"type": "MMFullyShardedDataParallel"}),
        (
            dict(parallel="hsdp"),
            "hsdp",
            {"type": "MMFullyShardedDataParallel", "shard_size": "machine"},
        ),
        (
            dict(parallel=dict(type="hsdp", shard_size=4, wrap=["Block"], param_dtype="bf16")),
            "hsdp",
            {"type": "MMFullyShardedDataParallel", "shard_size": 4, "wrap": ["Block"], "param_dtype": "bf16"},
        ),
        (dict(model_wrapper_cfg=dict(static_graph=True)), "ddp", {"static_graph": True}),
        (
            dict(model_wrapper_cfg=dict(type="MMFullyShardedDataParallel")),
            "fsdp2",
            {"type": "MMFullyShardedDataParallel"},
        ),
        (
            dict(model_wrapper_cfg=dict(type="MMFullyShardedDataParallel", shard_size=2)),
            "hsdp",
            {"type": "MMFullyShardedDataParallel", "shard_size": 2},
        ),
        (dict(model_wrapper_cfg=dict(type=Mine)), "custom", {"type": Mine}),
    ],
)
def test_parallel_and_model_wrapper_cfg_set_the_same_option(cfg, kind, wrapper):
    parallel = SpeedPlan.read(cfg=cfg).parallel
    assert (parallel.kind, parallel.wrapper) == (kind, wrapper)
    assert parallel.sharded == (kind in ("fsdp2", "hsdp"))


# ---- SuperGradients ---------------------------------------------------------------------------------------


def test_supergradients_keys_are_read():
    params = dict(
        max_epochs=3,  # not a speed option
        mixed_precision=True,
        torch_compile=True,
        torch_compile_mode="max-autotune",
        torch_compile_options=dict(dynamic=False),
        torch_compile_loss=True,
        ema=True,
        ema_params=dict(decay=0.9999, decay_type="exp", beta=15),
        sync_bn=True,
        multi_gpu="DDP",
        batch_accumulate=4,
        clip_grad_norm=2.5,
        speed=dict(channels_last=True),
    )
    plan = SpeedPlan.read(training_params=params, device="cuda")
    assert plan.precision == "fp16"
    assert plan.compile == CompileOptions(mode="max-autotune", dynamic=False)
    assert (plan.ema.decay, plan.ema.type, plan.ema.beta) == (0.9999, "exp", 15)
    assert plan.sync_bn is plan.channels_last is True
    assert plan.parallel.kind == "ddp"
    assert (plan.accumulate, plan.clip_grad.max_norm) == (4, 2.5)
    assert plan.sources["ema"] == "training_params.ema"
    assert plan.sources["channels_last"] == "training_params.speed.channels_last"
    assert SpeedPlan.read(training_params=params).precision == "bf16"  # autocast's default dtype on CPU


# ---- two front ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("front_ends", "message"),
    [
        (
            dict(speed=dict(accumulate=4), optim_wrapper=dict(optimizer=SGD, accumulative_counts=2)),
            "optim_wrapper.accumulative_counts: 2 conflicts with speed.accumulate=4",
        ),
        (
            dict(speed=dict(precision="fp32"), optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD)),
            "optim_wrapper.dtype: 'bf16' conflicts with speed.precision='fp32'",
        ),
        (
            dict(speed=dict(compile=False), cfg=dict(compile=True)),
            "compile: True conflicts with speed.compile=False",
        ),
        (
            dict(speed=dict(ema=True), custom_hooks=[dict(type="EMAHook", momentum=0.01)]),
            "custom_hooks.EMAHook: .*0.01.* conflicts with speed.ema=True",
        ),
        (
            dict(cfg=dict(sync_bn="torch"), training_params=dict(sync_bn=False)),
            "training_params.sync_bn: False conflicts with sync_bn=True",
        ),
    ],
)
def test_conflict_error_names_both_front_ends(front_ends, message):
    with pytest.raises(ConfigError, match=message):
        SpeedPlan.read(**front_ends)
