"""Types of the arguments of `Runner` other than `speed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypeAlias, TypedDict

from slipstream.config_types.mapping import AnyMapping
from slipstream.config_types.speed import ClipGradCfg

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from slipstream.hooks import Hook, Priority

__all__ = [
    "AutoScaleLrCfg",
    "CheckpointHookCfg",
    "DataLoaderCfg",
    "DefaultHooksCfg",
    "EnvCfg",
    "EpochTrainCfg",
    "EvalCfg",
    "IterTrainCfg",
    "LimitedLoaderCfg",
    "LoggerHookCfg",
    "LoopTrainCfg",
    "OptimWrapperCfg",
    "RandomnessCfg",
    "TrainableModel",
]

_Type: TypeAlias = str | Callable[..., Any]


class TrainableModel(Protocol):
    """A model with a training step: a `BaseModel`, or a module that defines `train_step(data, optim_wrapper)`."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch."""


class OptimWrapperCfg(TypedDict, total=False):
    """`optim_wrapper`: the arguments of `AmpOptimWrapper` and `DefaultOptimWrapperConstructor`."""

    type: _Type
    optimizer: Required[Optimizer | Mapping[str, Any]]
    constructor: _Type
    paramwise_cfg: Mapping[str, Any] | None
    accumulative_counts: int
    clip_grad: ClipGradCfg | AnyMapping | None
    dtype: str | torch.dtype | None
    loss_scale: Literal["dynamic"] | float | Mapping[str, Any]


class _ValidationCfg(TypedDict, total=False):
    """The arguments common to all training loops."""

    val_begin: int
    val_interval: int
    dynamic_intervals: Sequence[tuple[int, int]] | None


class EpochTrainCfg(_ValidationCfg, total=False):
    """`train_cfg` of `EpochBasedTrainLoop`."""

    by_epoch: Required[Literal[True]]
    max_epochs: Required[int]


class IterTrainCfg(_ValidationCfg, total=False):
    """`train_cfg` of `IterBasedTrainLoop`."""

    by_epoch: Required[Literal[False]]
    max_iters: Required[int]


class LoopTrainCfg(_ValidationCfg, total=False):
    """`train_cfg` with the `type` of the loop."""

    type: Required[_Type]
    max_epochs: int
    max_iters: int


class EvalCfg(TypedDict, total=False):
    """`val_cfg` and `test_cfg`: the `type` of the loop, and the arguments of `ValLoop` and `TestLoop`."""

    type: _Type
    fp16: bool


class DataLoaderCfg(TypedDict, total=False):
    """A data loader; see `slipstream.dataset.loading.loader.build_dataloader`."""

    dataset: Required[Any]
    batch_size: int
    shuffle: bool
    sampler: Any
    batch_sampler: Any
    num_workers: int | Literal["auto"]
    collate_fn: _Type | Mapping[str, Any]
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | Literal["auto"] | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    num_batch_per_epoch: int | None
    skip_errors: int
    stall_warning: float


class LimitedLoaderCfg(TypedDict, total=False):
    """An existing data loader with a limited number of batches."""

    dataloader: Required[DataLoader[Any]]
    num_batch_per_epoch: int | None


class AutoScaleLrCfg(TypedDict, total=False):
    """`auto_scale_lr`; see `slipstream.runner.builders.scale_lr`."""

    enable: bool
    base_batch_size: int


class RandomnessCfg(TypedDict, total=False):
    """Keys of `slipstream.runner.environment.Randomness`."""

    seed: int | None
    deterministic: bool
    diff_rank_seed: bool


class EnvCfg(TypedDict, total=False):
    """Keys of `slipstream.runner.environment.EnvOptions`."""

    cudnn_benchmark: bool
    mp_cfg: dict[str, Any]
    dist_cfg: dict[str, Any]
    resource_limit: int


class _HookCfg(TypedDict, total=False):
    """The keys common to `CheckpointHookCfg` and `LoggerHookCfg`."""

    type: Required[_Type]
    interval: int
    priority: int | str | Priority


class CheckpointHookCfg(_HookCfg, total=False):
    """Keys of `slipstream.hooks.CheckpointHook`."""

    by_epoch: bool | None
    save_optimizer: bool
    save_param_scheduler: bool
    out_dir: str | None
    max_keep_ckpts: int
    save_last: bool
    save_best: str | list[str] | None
    rule: str | None
    filename_tmpl: str | None
    save_begin: int
    best_filename: str | None
    save_epochs: Sequence[int]
    consolidate: bool
    async_save: bool


class LoggerHookCfg(_HookCfg, total=False):
    """Keys of `slipstream.hooks.LoggerHook`."""

    ignore_last: bool
    interval_exp_name: int
    log_metric_by_epoch: bool


class DefaultHooksCfg(TypedDict, total=False):
    """`default_hooks`: hooks in `slipstream.runner.user_config.DEFAULT_HOOKS`, keyed by name. None removes a hook."""

    runtime_info: Hook | Mapping[str, Any] | None
    timer: Hook | Mapping[str, Any] | None
    class_count: Hook | Mapping[str, Any] | None
    sampler_seed: Hook | Mapping[str, Any] | None
    logger: Hook | LoggerHookCfg | AnyMapping | None
    param_scheduler: Hook | Mapping[str, Any] | None
    checkpoint: Hook | CheckpointHookCfg | AnyMapping | None
    report: Hook | Mapping[str, Any] | None
    preemption: Hook | Mapping[str, Any] | None
