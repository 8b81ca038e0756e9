"""Tests of `SpeedPlan`: reading `speed=`, the options that `auto` selects, and invalid plans."""

import pytest
import torch
from torch import nn

from accelerators import cuda_only
from slipstream.errors import ConfigError
from slipstream.speed import Capabilities, CompileOptions, SpeedPlan
from slipstream.speed.auto import convolution_fraction
from slipstream.speed.plan import idle

CPU = Capabilities()
H100 = Capabilities(device="cuda", capability=(9, 0), bf16=True, torchao=True, convolutions=0.9, world_size=8)
V100 = Capabilities(device="cuda", capability=(7, 0), bf16=False, convolutions=0.9)


def plan(speed, capabilities=CPU, **front_ends):
    return SpeedPlan.read(speed, **front_ends).complete(capabilities)


def test_every_option_can_be_set():
    words = dict(
        precision="bf16",
        compile=dict(scope="model", backend="eager"),
        ema=dict(decay=0.99),
        sync_bn=True,
        parallel="ddp",
        find_unused_parameters=True,
        accumulate=4,
        clip_grad=dict(max_norm=1.0),
        gradient_centralization=True,
        adaptive_clip=True,
        layer_decay=0.75,
        sam=dict(rho=0.1),
        activation_checkpointing=["blocks.*"],
        channels_last=True,
        fused=True,
        prefetch=2,
        cuda_graph=True,
        nan_guard="skip",
        cudnn_benchmark=True,
        expandable_segments=True,
        gc=100,
    )
    assert set(words) == set(SpeedPlan.options())
    read = SpeedPlan.read(words)
    off = SpeedPlan()
    assert [option for option in words if getattr(read, option) == getattr(off, option)] == []
    assert read.sources == {option: f"speed.{option}" for option in words}
    assert read.compile == CompileOptions("eager", scope="model")
    assert (read.accumulate, read.clip_grad.max_norm, read.ema.decay) == (4, 1.0, 0.99)


def test_none_means_not_set_except_for_fused():
    read = SpeedPlan.read(dict.fromkeys(SpeedPlan.options()))
    assert read.sources == {"fused": "speed.fused"}
    assert (read.fused, SpeedPlan().fused) == (None, False)
    assert {
        option for option in SpeedPlan.options() if getattr(read, option) != getattr(SpeedPlan(), option)
    } == {"fused"}
    with pytest.raises(
        ConfigError, match=r"training_params\.speed\.fused: True conflicts with speed\.fused=None"
    ):
        SpeedPlan.read(dict(fused=None), training_params=dict(speed=dict(fused=True)))


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        ("fast", "speed: must be 'auto' or a dict"),
        (["bf16"], "speed: must be 'auto' or a dict"),
        (dict(precison="bf16"), "speed.precison: no such option; did you mean 'precision'"),
        (dict(sources={}), "speed.sources: no such option"),
        (
            dict(gradient_accumulation_steps=4),
            "gradient_accumulation_steps: no such option; use 'accumulate'",
        ),
        (dict(auto="yes"), "speed.auto: must be True or False"),
        (dict(precision="int4"), "speed.precision: must be one of"),
        (dict(compile=dict(scop="step")), "speed.compile.scop: .*'scope'"),
        (dict(compile=dict(scope="steps")), "speed.compile.scope: .*'steps'"),
        (dict(sync_bn="apex"), "speed.sync_bn: must be 'torch'"),
        (dict(parallel="fsdp"), "speed.parallel: must be one of .*; did you mean 'fsdp2'"),
        (dict(parallel=dict(type="fsdp2", warp=["A"])), "speed.parallel.warp: .*'wrap'"),
        (dict(accumulate=0), "speed.accumulate: .*at least 1, not 0"),
        (dict(accumulate=True), "speed.accumulate: .*not True"),
        (dict(accumulate=2.0), "speed.accumulate: .*not 2.0"),
        (dict(clip_grad=5), "speed.clip_grad: must be a dict such as dict.max_norm=35., not 5"),
        (dict(clip_grad=dict(max_nrm=5)), "speed.clip_grad.max_nrm: .*'max_norm'"),
        (dict(ema=dict(decay=2.0)), "speed.ema.decay"),
        (dict(channels_last=1.5), "speed.channels_last: must be True or False"),
        (dict(fused="yes"), "speed.fused: must be True"),
        (dict(prefetch=-1), "speed.prefetch"),
        (dict(cuda_graph="on"), "speed.cuda_graph: must be True or False"),
        (dict(nan_guard="skp"), "speed.nan_guard: .*'skip'"),
        (dict(gc="often"), "speed.gc"),
    ],
)
def test_invalid_value_error_contains_the_config_path(speed, message):
    with pytest.raises(ConfigError, match=message):
        SpeedPlan.read(speed)


# ---- auto ----------------------------------------------------------------------------------------------


def test_auto_selects_options_for_the_device():
    modern, older, cpu = (plan("auto", capabilities) for capabilities in (H100, V100, CPU))
    assert modern.precision.name == "bf16"
    assert modern.sources["precision"] == "auto: this device supports bf16"
    assert older.precision is None
    assert "precision" in older.notes
    assert cpu.precision is None
    assert plan("auto", Capabilities(device="cuda", capability=(8, 0))).precision.name == "tf32"
    assert (modern.prefetch, older.prefetch, cpu.prefetch) == (2, 2, 0)
    assert modern.fused is older.fused is cpu.fused is None  # None: enabled if torch supports it
    assert modern.cudnn_benchmark
    assert not cpu.cudnn_benchmark


def test_auto_enables_channels_last_only_for_convolutional_models():
    assert plan("auto", H100).channels_last
    transformer = plan("auto", Capabilities(device="cuda", bf16=True, convolutions=0.1))
    assert not transformer.channels_last
    assert not transformer.cudnn_benchmark


@pytest.mark.parametrize("front_end", [{}, {"env_cfg": {"cudnn_benchmark": False}}])
def test_explicit_option_overrides_auto(front_end):
    words = dict(auto=True, precision="fp32", channels_last=False, prefetch=0, compile=dict(backend="eager"))
    explicit = plan(words, H100, **front_end)
    assert explicit.precision.name == "fp32"
    assert not explicit.channels_last
    assert explicit.prefetch == 0
    assert explicit.compile is not None
    assert explicit.fused is None  # selected by auto, because no front end sets it
    assert explicit.cudnn_benchmark == (not front_end)
    assert not explicit.notes


# ---- invalid plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "capabilities", "message"),
    [
        (
            dict(precision="fp8"),
            CPU,
            "speed.precision: 'fp8' requires an NVIDIA GPU of compute capability 8.9",
        ),
        (
            dict(precision="fp8"),
            V100,
            "speed.precision: 'fp8' requires an NVIDIA GPU of compute capability 8.9",
        ),
        (
            dict(precision="fp8"),
            Capabilities(device="cuda", capability=(9, 0)),
            "speed.precision: .*slipstream.fp8",
        ),
        (dict(cuda_graph=True, compile=True), CPU, "speed.cuda_graph: .*GPU"),
        (dict(cuda_graph=True), H100, "speed.cuda_graph: .*add compile=dict.scope='step'."),
        (dict(cuda_graph=True, compile=dict(scope="model")), H100, "speed.cuda_graph: .*scope='step'"),
        (dict(compile=dict(scope="step"), parallel="fsdp2"), CPU, "speed.compile: .*scope='model'"),
        (dict(compile=dict(scope="step"), parallel="hsdp"), CPU, "speed.compile: .*scope='model'"),
        (
            dict(find_unused_parameters=True, parallel="fsdp2"),
            CPU,
            "speed.find_unused_parameters: applies only to DDP",
        ),
    ],
)
def test_error_for_invalid_plan_contains_config_path_and_remedy(speed, capabilities, message):
    with pytest.raises(ConfigError, match=message):
        plan(speed, capabilities)


def test_option_without_effect_remains_in_the_plan_and_is_reported():
    words = dict(precision="tf32", cudnn_benchmark=True, expandable_segments=True, prefetch=2, sync_bn=True)
    on_cpu = plan(words)
    assert on_cpu == SpeedPlan.read(words)
    assert {option for option, _ in idle(on_cpu, CPU)} == set(words)
    assert list(idle(plan(words, H100), H100)) == []


# ---- capabilities ---------------------------------------------------------------------------------------------------


def test_convolution_fraction_counts_parameters():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Linear(3, 2))  # 54 of 62 parameters
    assert convolution_fraction(model) == pytest.approx(54 / 62)
    assert convolution_fraction(nn.ReLU()) == 0.0
    shared = nn.Conv2d(2, 3, 3, bias=False)
    assert convolution_fraction(nn.Sequential(shared, shared)) == 1.0
    normalized = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 3))  # 54 weights, 2 norms, 2 biases
    parametrized = nn.utils.parametrize.register_parametrization(normalized, "bias", nn.Identity())
    assert convolution_fraction(parametrized) == pytest.approx(56 / 58)


@pytest.mark.gpu
@cuda_only
def test_capabilities_of_a_gpu_are_detected():
    capabilities = Capabilities.here("cuda", nn.Conv2d(1, 1, 1))
    assert capabilities.capability == torch.cuda.get_device_capability()
    assert capabilities.bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
