"""Types of the dicts that `Runner` and `accelerate` accept, for editors and type checkers.

The class that a docstring names documents the keys. At run time the values are built-in dicts, and their readers check
them. For type checkers:

- mypy checks the keys and values of `dict(...)`, `{...}` and `SpeedCfg(...)`. pyright infers the type of `dict(...)`
  without its keys, so it checks only `SpeedCfg(...)` and `{...}` assigned to a variable of type `SpeedCfg`.
- For a dict in a variable, write `speed = SpeedCfg(compile=True)`. mypy does not know the keys of the type
  `dict[str, bool]`, which it infers for `speed = dict(compile=True)`, and reports an error where the dict is passed.
- Mappings with values of type `Any` are not checked: a `Config` and its parts, a `dict[str, Any]`. Annotate as
  `dict[str, Any]` a dict with arguments of your own class, and a changed part of a `Config`
  (`{**cfg.train_dataloader, "num_workers": 0}`).
"""

from slipstream.config_types.mapping import AnyMapping, ValidOption
from slipstream.config_types.runner import (
    AutoScaleLrCfg,
    CheckpointHookCfg,
    DataLoaderCfg,
    DefaultHooksCfg,
    EnvCfg,
    EpochTrainCfg,
    EvalCfg,
    IterTrainCfg,
    LimitedLoaderCfg,
    LoggerHookCfg,
    LoopTrainCfg,
    OptimWrapperCfg,
    RandomnessCfg,
    TrainableModel,
)
from slipstream.config_types.speed import (
    ActivationCheckpointingCfg,
    AdaptiveClipCfg,
    ClipGradCfg,
    CompileCfg,
    DdpCfg,
    EmaCfg,
    GradientCentralizationCfg,
    LayerDecayCfg,
    NanGuardCfg,
    SamCfg,
    ShardedCfg,
    SpeedCfg,
)

__all__ = [
    "ActivationCheckpointingCfg",
    "AdaptiveClipCfg",
    "AnyMapping",
    "AutoScaleLrCfg",
    "CheckpointHookCfg",
    "ClipGradCfg",
    "CompileCfg",
    "DataLoaderCfg",
    "DdpCfg",
    "DefaultHooksCfg",
    "EmaCfg",
    "EnvCfg",
    "EpochTrainCfg",
    "EvalCfg",
    "GradientCentralizationCfg",
    "IterTrainCfg",
    "LayerDecayCfg",
    "LimitedLoaderCfg",
    "LoggerHookCfg",
    "LoopTrainCfg",
    "NanGuardCfg",
    "OptimWrapperCfg",
    "RandomnessCfg",
    "SamCfg",
    "ShardedCfg",
    "SpeedCfg",
    "TrainableModel",
    "ValidOption",
]
