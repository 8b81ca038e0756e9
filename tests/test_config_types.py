"""Tests of the argument types: mypy flags mistakes in a script, and the types have the keys that Slipstream accepts."""

import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from slipstream import config_types
from slipstream.hooks import CheckpointHook, LoggerHook
from slipstream.model.wrappers import FullyShardedOptions, MMDistributedDataParallel
from slipstream.optim import AmpOptimWrapper, GradClip, OptimWrapper
from slipstream.runner import loops
from slipstream.runner.environment import EnvOptions, Randomness
from slipstream.runner.user_config import DEFAULT_HOOKS
from slipstream.speed.activation_checkpointing import ActivationCheckpointingOptions
from slipstream.speed.adaptive_clip import AdaptiveClipOptions
from slipstream.speed.compile import CompileOptions
from slipstream.speed.ema import EmaOptions
from slipstream.speed.gradient_centralization import GradientCentralizationOptions
from slipstream.speed.layer_decay import LayerDecayOptions
from slipstream.speed.nan_guard import NanGuardOptions
from slipstream.speed.plan import SpeedPlan
from slipstream.speed.sam import SamOptions

ROOT = Path(__file__).parents[1]
SCRIPTS = Path("tests/typed_scripts")
HOOK = {"type", "priority"}


@pytest.mark.slow
def test_mypy_flags_the_marked_lines_of_user_scripts_and_no_others():
    # `make types` runs mypy with the same settings, so this command can use the same cache.
    command = [sys.executable, "-m", "mypy", "src/slipstream", SCRIPTS / "good.py", SCRIPTS / "bad.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    flagged = {tuple(line.split(":")[:2]) for line in result.stdout.splitlines() if ": error: " in line}
    lines = enumerate((ROOT / SCRIPTS / "bad.py").read_text().splitlines(), 1)
    bad = str(SCRIPTS / "bad.py")
    assert flagged == {(bad, str(n)) for n, line in lines if line.endswith("# error")}, (
        result.stdout + result.stderr
    )


def keys(kind):
    """Return the keys of a TypedDict, the fields of a dataclass, or the parameters of a class."""
    if typing.is_typeddict(kind):
        return kind.__required_keys__ | kind.__optional_keys__
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    parameters = inspect.signature(kind).parameters.values()
    passed_by_us = {"runner", "dataloader", "evaluator", "module"}
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - passed_by_us


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SpeedCfg", {*SpeedPlan.options(), "auto"}),
        ("CompileCfg", keys(CompileOptions)),
        ("EmaCfg", keys(EmaOptions)),
        ("ShardedCfg", keys(FullyShardedOptions) | {"type"}),
        ("ClipGradCfg", keys(GradClip)),
        ("GradientCentralizationCfg", keys(GradientCentralizationOptions)),
        ("AdaptiveClipCfg", keys(AdaptiveClipOptions)),
        ("LayerDecayCfg", keys(LayerDecayOptions)),
        ("SamCfg", keys(SamOptions)),
        ("ActivationCheckpointingCfg", keys(ActivationCheckpointingOptions)),
        ("NanGuardCfg", keys(NanGuardOptions)),
        (
            "OptimWrapperCfg",
            keys(OptimWrapper) | keys(AmpOptimWrapper) | {"type", "constructor", "paramwise_cfg"},
        ),
        ("EpochTrainCfg", keys(loops.EpochBasedTrainLoop) | {"by_epoch"}),
        ("IterTrainCfg", keys(loops.IterBasedTrainLoop) | {"by_epoch"}),
        ("LoopTrainCfg", keys(loops.EpochBasedTrainLoop) | keys(loops.IterBasedTrainLoop) | {"type"}),
        ("EvalCfg", keys(loops.ValLoop) | keys(loops.TestLoop) | {"type"}),
        ("RandomnessCfg", keys(Randomness)),
        ("EnvCfg", keys(EnvOptions)),
        ("CheckpointHookCfg", keys(CheckpointHook) | HOOK),
        ("LoggerHookCfg", keys(LoggerHook) | HOOK),
        ("DefaultHooksCfg", set(DEFAULT_HOOKS)),
    ],
)
def test_keys_match_the_reader(name, expected):
    assert keys(getattr(config_types, name)) == expected


def test_keys_for_torch_classes_match_their_parameters():
    ddp = keys(MMDistributedDataParallel) | keys(DistributedDataParallel)
    assert keys(config_types.DdpCfg) - {"type"} <= ddp
    own = {"num_batch_per_epoch", "skip_errors", "stall_warning"}
    assert keys(config_types.DataLoaderCfg) - own <= keys(DataLoader)


@pytest.mark.parametrize("option", SpeedPlan.options())
def test_literal_values_of_options_are_valid(option):
    hint = typing.get_type_hints(config_types.SpeedCfg)[option]
    members = [hint, *typing.get_args(hint)]
    for value in [
        v
        for member in members
        if typing.get_origin(member) is typing.Literal
        for v in typing.get_args(member)
    ]:
        SpeedPlan.read({option: value})
