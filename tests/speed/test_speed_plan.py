"""Tests of `SpeedPlan`: reading `speed=`, the options that `auto` selects, and invalid plans."""

import pytest

from slipstream.errors import ConfigError
from slipstream.speed import Capabilities, CompileOptions, SpeedPlan

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


# ---- auto ----------------------------------------------------------------------------------------------


def test_auto_selects_options_for_the_device():
    modern, older, cpu = (plan("auto", capabilities) for capabilities in (H100, V100, CPU))
    assert modern.precision == "bf16"
    assert modern.sources["precision"] == "auto: this device supports bf16"
    assert older.precision is None
    assert "precision" in older.notes
    assert cpu.precision is None
    assert plan("auto", Capabilities(device="cuda", capability=(8, 0))).precision == "tf32"
    assert (modern.prefetch, older.prefetch, cpu.prefetch) == (2, 2, 0)
    assert modern.fused is older.fused is cpu.fused is None  # None: enabled if torch supports it
    assert modern.cudnn_benchmark
    assert not cpu.cudnn_benchmark


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
