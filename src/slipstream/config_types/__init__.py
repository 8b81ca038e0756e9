"""Types of the dicts that `Runner` and `accelerate` accept, for editors and type checkers.

Most docstrings name the class or function that documents the keys. At run time, the values are built-in dicts, which
are checked when they are read. For type checkers:

- mypy checks the keys and values of `dict(...)`, `{...}` and `SpeedCfg(...)`. pyright infers the type of `dict(...)`
  without its keys, so it checks only `SpeedCfg(...)` and `{...}` assigned to a variable of type `SpeedCfg`.
- To assign a dict to a variable, write `speed = SpeedCfg(compile=True)`. For `speed = dict(compile=True)`, mypy infers
  `dict[str, bool]`, a type without known keys, and reports an error where the dict is passed.
- Mappings with values of type `Any`, such as `dict[str, Any]`, `Config` and the dicts in a `Config`, are not checked.
  Use the annotation `dict[str, Any]` for the arguments of your own class, and for a modified copy of a dict in a
  `Config` (`{**cfg.train_dataloader, "num_workers": 0}`).
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
