"""Types of the dicts in `speed=`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Required, TypeAlias, TypedDict, TypeVar

from slipstream.config_types.mapping import AnyMapping

__all__ = [
    "ActivationCheckpointingCfg",
    "AdaptiveClipCfg",
    "ClipGradCfg",
    "CompileCfg",
    "DdpCfg",
    "EmaCfg",
    "GradientCentralizationCfg",
    "LayerDecayCfg",
    "NanGuardCfg",
    "SamCfg",
    "ShardedCfg",
    "SpeedCfg",
]

_T = TypeVar("_T")
_Switch: TypeAlias = bool | _T | AnyMapping | None
_Names: TypeAlias = list[str] | tuple[str, ...]


class CompileCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.compile.CompileOptions`."""

    backend: str | Callable[..., Any]
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    dynamic: bool | None
    fullgraph: bool
    options: dict[str, Any] | None
    scope: Literal["step", "model", "block"] | None
    blocks: _Names
    cache: bool | str
    verify: bool
    wait: bool
    budget: float | str | None


class EmaCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.ema.EmaOptions`."""

    decay: float | None
    type: Literal["constant", "threshold", "exp", "swa"]
    beta: float | None
    interval: int
    begin_iter: int
    begin_epoch: int
    count: Literal["updates", "batches"]


class ShardedCfg(TypedDict, total=False):
    """`type` and the fields of `slipstream.model.wrappers.FullyShardedOptions`."""

    type: Required[Literal["fsdp2", "hsdp"]]
    shard_size: int | Literal["machine"] | None
    wrap: _Names
    min_params: int | None
    param_dtype: Literal["bf16"] | None
    reduce_dtype: Literal["bf16", "fp32"]
    reshard_after_forward: bool | int | None


class DdpCfg(TypedDict, total=False):
    """`type` and the arguments of `MMDistributedDataParallel` and `torch.nn.parallel.DistributedDataParallel`."""

    type: Required[Literal["ddp"]]
    broadcast_buffers: bool
    bucket_cap_mb: float | None
    comm_hook: str | Mapping[str, Any] | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    init_sync: bool
    process_group: Any
    static_graph: bool


class ClipGradCfg(TypedDict, total=False):
    """Keys of `slipstream.optim.GradClip`."""

    type: Literal["norm", "value"]
    max_norm: float | None
    norm_type: float
    clip_value: float | None


class GradientCentralizationCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.gradient_centralization.GradientCentralizationOptions`."""

    conv_only: bool


class AdaptiveClipCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.adaptive_clip.AdaptiveClipOptions`."""

    clip_factor: float
    eps: float
    exclude: _Names


class LayerDecayCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.layer_decay.LayerDecayOptions`."""

    decay: float
    layers: _Names | None


class SamCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.sam.SamOptions`."""

    rho: float
    adaptive: bool
    eta: float


class ActivationCheckpointingCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.activation_checkpointing.ActivationCheckpointingOptions`."""

    modules: _Names | None
    offload: bool


class NanGuardCfg(TypedDict, total=False):
    """Keys of `slipstream.speed.nan_guard.NanGuardOptions`."""

    action: Literal["stop", "skip", "rollback"]
    locate: bool
    max_skipped: int
    max_rollbacks: int
    skip_before: int


class SpeedCfg(TypedDict, total=False):
    """`speed=`: the options of `slipstream.speed.plan.SpeedPlan`, and `auto`."""

    auto: bool | None
    precision: (
        Literal["fp32", "float32", "tf32", "bf16", "bfloat16", "fp16", "float16", "fp8", "float8"] | None
    )
    compile: _Switch[CompileCfg | Literal["step", "model", "block"]]
    ema: _Switch[EmaCfg]
    sync_bn: bool | Literal["torch"] | None
    parallel: Literal["ddp", "fsdp2", "hsdp"] | DdpCfg | ShardedCfg | AnyMapping | None
    find_unused_parameters: bool | None
    accumulate: int | None
    clip_grad: ClipGradCfg | AnyMapping | Literal[False] | None
    gradient_centralization: _Switch[GradientCentralizationCfg]
    adaptive_clip: _Switch[AdaptiveClipCfg]
    layer_decay: _Switch[LayerDecayCfg | float]
    sam: _Switch[SamCfg]
    activation_checkpointing: _Switch[ActivationCheckpointingCfg | list[str]]
    channels_last: bool | None
    fused: bool | None
    prefetch: int | None
    cuda_graph: bool | None
    nan_guard: _Switch[NanGuardCfg | Literal["stop", "skip", "rollback"]]
    cudnn_benchmark: bool | None
    expandable_segments: bool | None
    gc: int | None
