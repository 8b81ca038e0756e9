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
