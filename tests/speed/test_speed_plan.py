"""The levers, read from the words of a Runner's configuration."""

import pytest

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.speed import CompileOptions, SpeedPlan


def test_without_words_every_lever_is_off():
    assert SpeedPlan.from_cfg({}) == SpeedPlan(None, None, None, False)
    off = {"compile": False, "sync_bn": None, "activation_checkpointing": None, "efficient_conv_bn_eval": []}
    assert SpeedPlan.from_cfg(off) == SpeedPlan()


def test_mmengines_words_are_understood():
    cfg = Config(
        dict(
            compile=dict(backend="eager", dynamic=False),
            sync_bn="torch",
            model_wrapper_cfg=dict(type="MMDistributedDataParallel", static_graph=True),
            find_unused_parameters=True,
            optim_wrapper=dict(type="OptimWrapper"),  # not a lever
        )
    )
    plan = SpeedPlan.from_cfg(cfg)
    assert plan.compile == CompileOptions("eager", dynamic=False)
    assert plan.sync_bn == "torch"
    assert plan.model_wrapper == {"type": "MMDistributedDataParallel", "static_graph": True}
    assert plan.find_unused_parameters is True


@pytest.mark.parametrize(
    ("word", "lever"), [(True, "torch"), ("torch", "torch"), (False, None), (None, None)]
)
def test_sync_bn_is_torchs_or_none(word, lever):
    assert SpeedPlan.from_cfg({"sync_bn": word}).sync_bn == lever


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"sync_bn": "mmcv"}, "sync_bn: must be 'torch' .*, not 'mmcv'"),
        ({"activation_checkpointing": ["backbone"]}, "activation_checkpointing: .* not available"),
        ({"efficient_conv_bn_eval": "[net]"}, "efficient_conv_bn_eval: .* not available"),
        ({"compile": {"bakcend": "eager"}}, "compile.bakcend: .*'backend'"),
    ],
)
def test_a_lever_that_is_wrong_or_missing_is_named(cfg, message):
    with pytest.raises(ConfigError, match=message):
        SpeedPlan.from_cfg(cfg)


@pytest.mark.parametrize(
    ("parallel", "wrapper"),
    [
        (None, None),
        ("ddp", {}),
        (dict(type="ddp", static_graph=True), {"static_graph": True}),
        ("fsdp2", {"type": "MMFullyShardedDataParallel"}),
        ("hsdp", {"type": "MMFullyShardedDataParallel", "shard_size": "machine"}),
        (
            dict(type="hsdp", shard_size=4, wrap=["Block"], param_dtype="bf16"),
            {"type": "MMFullyShardedDataParallel", "shard_size": 4, "wrap": ["Block"], "param_dtype": "bf16"},
        ),
    ],
)
def test_parallel_is_a_short_word_for_a_model_wrapper(parallel, wrapper):
    assert SpeedPlan.from_cfg({"parallel": parallel}).model_wrapper == wrapper


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (dict(parallel="fsdp"), "parallel: must be one of .*; did you mean 'fsdp2'"),
        (dict(parallel=2), "parallel: must be a name or a dict"),
        (dict(parallel=dict(shard_size=2)), "parallel: must be a name or a dict"),
        (
            dict(parallel="ddp", model_wrapper_cfg=dict(type="X")),
            "give parallel or model_wrapper_cfg, not both",
        ),
        (dict(parallel=dict(type="fsdp2", warp=["A"])), "parallel.warp: no such option; did you mean 'wrap'"),
        (dict(parallel=dict(type="fsdp2", param_dtype="fp8")), "parallel.param_dtype: expected"),
        (
            dict(parallel=dict(type="fsdp2", wrap=["A"], min_params=9)),
            "parallel.min_params: give wrap or min",
        ),
        (dict(parallel=dict(type="fsdp2", min_params=0)), "parallel.min_params: must be at least 1"),
    ],
)
def test_a_wrong_word_for_parallel_names_its_place_even_on_one_process(cfg, message):
    with pytest.raises(ConfigError, match=message):
        SpeedPlan.from_cfg(cfg)
