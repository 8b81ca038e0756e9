"""SuperGradients' `training_params`: the type, default and translation of each key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from slipstream.config import options
from slipstream.errors import ConfigError

__all__ = ["TrainingParams", "UnsupportedKey", "plain"]

_OLD_SCHEDULES = {
    "step": "StepLRScheduler",
    "poly": "PolyLRScheduler",
    "cosine": "CosineLRScheduler",
    "exp": "ExponentialLRScheduler",
    "function": "FunctionLRScheduler",
}
_OLD_WARMUPS = {
    "linear_step": "LinearEpochLRWarmup",
    "linear_epoch_step": "LinearEpochLRWarmup",
    "linear_batch_step": "LinearBatchLRWarmup",
}
_HYDRA_KEYS = ("_convert_",)
"""Keys that only Hydra's `instantiate` uses."""


@dataclass(frozen=True)
class UnsupportedKey:
    """The reason why a key supports only its default value."""

    reason: str


_REMOTE = UnsupportedKey(
    "uploads are not supported; copy the run's folder, or use sg_logger 'wandb_sg_logger'"
)
_BOARD = UnsupportedKey(
    "TensorBoard is not started automatically; run `tensorboard --logdir` on the run's folder"
)
_PLAN = "SpeedPlan"


@dataclass(frozen=True)
class TrainingParams:
    """One field for each SuperGradients key, with the same default value, plus Slipstream's own key `speed`.

    The annotation of a field describes its translation: an argument of the `Runner`, a hook, or an option.
    A key annotated with `UnsupportedKey` supports only its default value.
    """

    # Duration, validation and resuming.
    max_epochs: Annotated[int | None, "train_cfg.max_epochs"] = None
    max_train_batches: Annotated[int | None, "train_dataloader.num_batch_per_epoch"] = None
    max_valid_batches: Annotated[int | None, "val_dataloader.num_batch_per_epoch"] = None
    run_validation_freq: Annotated[int, "train_cfg.val_interval"] = 1
    run_test_freq: Annotated[int, "epochs between evaluations of test_loaders (a hook)"] = 1
    seed: Annotated[int | None, "randomness.seed"] = 42
    resume: Annotated[bool, "resume"] = False
    resume_path: Annotated[str | None, "resume"] = None
    ckpt_name: Annotated[str, "resume: file name in the run's folder"] = "ckpt_latest.pth"
    run_id: Annotated[
        str | int | None,
        UnsupportedKey(
            "an experiment has a single folder; use a different experiment_name, or set resume_path"
        ),
    ] = None
    resume_from_remote_sg_logger: Annotated[
        bool, UnsupportedKey("downloads are not supported; download the checkpoint and set resume_path")
    ] = False
    resume_strict_load: Annotated[bool, "no effect: a resumed run always requires all of its weights"] = False
    load_opt_params: Annotated[bool, "a hook: False resets the optimizer state of a resumed run"] = True
    finetune: Annotated[
        bool,
        "initial_lr: the network's get_finetune_lr_dict sets the rates; all parts except the heads are frozen",
    ] = False

    # Learning rates.
    initial_lr: Annotated[float | dict[str, Any] | None, "optim_wrapper"] = None
    lr_mode: Annotated[str | dict[str, Any] | None, "param_scheduler"] = None
    lr_schedule_function: Annotated[Callable[..., Any] | None, "param_scheduler"] = None
    lr_warmup_epochs: Annotated[int, "param_scheduler"] = 0
    lr_warmup_steps: Annotated[int, "param_scheduler"] = 0
    lr_cooldown_epochs: Annotated[int, "param_scheduler"] = 0
    warmup_initial_lr: Annotated[float | dict[str, Any] | None, "param_scheduler"] = None
    warmup_mode: Annotated[str | None, "param_scheduler"] = "LinearEpochLRWarmup"
    lr_updates: Annotated[list[Any], "param_scheduler"] = field(default_factory=list)
    lr_decay_factor: Annotated[float | None, "param_scheduler"] = None
    step_lr_update_freq: Annotated[float | None, "param_scheduler"] = None
    cosine_final_lr_ratio: Annotated[float, "param_scheduler"] = 0.01
    multiply_head_lr: Annotated[
        float,
        "no effect since SuperGradients 3.4, and a warning is logged; set initial_lr to a dict of rates by name prefix",
    ] = 1

    # Optimizer, loss, metrics.
    optimizer: Annotated[Any, "optim_wrapper"] = "SGD"
    optimizer_params: Annotated[dict[str, Any], "optim_wrapper"] = field(default_factory=dict)
    zero_weight_decay_on_bias_and_bn: Annotated[bool, "optim_wrapper"] = False
    loss: Annotated[Any, "model.loss"] = None
    criterion_params: Annotated[dict[str, Any], "model.loss"] = field(default_factory=dict)
    loss_logging_items_names: Annotated[
        list[str] | None, "no effect: losses are logged under the names that the loss returns"
    ] = None
    train_metrics_list: Annotated[list[Any], "model.train_metrics"] = field(default_factory=list)
    valid_metrics_list: Annotated[list[Any], "val_evaluator"] = field(default_factory=list)
    metric_to_watch: Annotated[str | None, "default_hooks.checkpoint.save_best"] = "Accuracy"
    greater_metric_to_watch_is_better: Annotated[bool, "default_hooks.checkpoint.rule"] = True

    # Options.
    speed: Annotated[str | dict[str, Any] | None, _PLAN] = None
    mixed_precision: Annotated[bool | str, _PLAN] = False
    torch_compile: Annotated[bool, _PLAN] = False
    torch_compile_loss: Annotated[bool, _PLAN] = False
    torch_compile_options: Annotated[dict[str, Any], _PLAN] = field(default_factory=dict)
    torch_compile_mode: Annotated[str | None, _PLAN] = None
    ema: Annotated[bool, _PLAN] = False
    ema_params: Annotated[dict[str, Any], _PLAN] = field(default_factory=dict)
    sync_bn: Annotated[bool, _PLAN] = False
    multi_gpu: Annotated[Any, _PLAN] = None
    batch_accumulate: Annotated[int, _PLAN] = 1
    clip_grad_norm: Annotated[float | None, _PLAN] = None
    enable_qat: Annotated[bool, UnsupportedKey("quantization-aware training is not supported")] = False
    kill_ddp_pgroup_on_end: Annotated[bool, "no effect: the launcher terminates the processes"] = True

    # Checkpoints, callbacks and logging.
    save_model: Annotated[bool, "default_hooks.checkpoint"] = True
    save_ckpt_epoch_list: Annotated[list[int], "default_hooks.checkpoint"] = field(default_factory=list)
    ckpt_best_name: Annotated[str, "default_hooks.checkpoint"] = "ckpt_best.pth"
    average_best_models: Annotated[bool, "AverageBestHook"] = True
    precise_bn: Annotated[bool, "PreciseBNHook"] = False
    precise_bn_batch_size: Annotated[int | None, "PreciseBNHook"] = None
    phase_callbacks: Annotated[list[Any], "custom_hooks"] = field(default_factory=list)
    pre_prediction_callback: Annotated[Callable[..., Any] | None, "model.pre_prediction_callback"] = None
    silent_mode: Annotated[bool, "log_level"] = False
    sg_logger: Annotated[Any, "visualizer"] = "base_sg_logger"
    sg_logger_params: Annotated[dict[str, Any], "visualizer"] = field(default_factory=dict)
    launch_tensorboard: Annotated[bool, _BOARD] = False
    tensorboard_port: Annotated[int | None, _BOARD] = None
    tb_files_user_prompt: Annotated[bool, UnsupportedKey("training is not interactive")] = False
    save_tensorboard_to_s3: Annotated[bool, _REMOTE] = False
    save_tensorboard_remote: Annotated[bool, _REMOTE] = False
    dataset_statistics: Annotated[bool, UnsupportedKey("use `slipstream data stats` instead")] = False
    log_installed_packages: Annotated[bool, "no effect: the log starts with the relevant versions"] = True
    save_full_train_log: Annotated[bool, "no effect: the log file is always complete, including errors"] = (
        False
    )

    @classmethod
    def read(cls, mapping: Mapping[str, Any]) -> TrainingParams:
        """Return the parameters. For a key that does not accept None, None selects the default.

        Raises:
            UnknownNameError: if a key does not exist.
            ConfigError: if a value has the wrong type or is not supported.
        """
        if not isinstance(plain_values := plain(mapping), Mapping):
            raise ConfigError(f"must be a dict, not {mapping!r}", "training_params")
        values = {key: value for key, value in plain_values.items() if key not in _HYDRA_KEYS}
        hints = get_type_hints(cls)
        kept = {key: v for key, v in values.items() if v is not None or _may_be_none(hints.get(key, Any))}
        params = options(cls, _with_current_names(kept), "training_params")
        params._check()
        return params

    @classmethod
    def table(cls) -> dict[str, str | UnsupportedKey]:
        """Return the translation of each key, or the reason why it supports only its default value."""
        hints = get_type_hints(cls, include_extras=True)
        return {f.name: hints[f.name].__metadata__[0] for f in fields(cls)}

    def changed(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults."""
        default = type(self)()
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}

    def _check(self) -> None:
        table = self.table()
        for key in self.changed():
            if isinstance(unsupported := table[key], UnsupportedKey):
                raise ConfigError(unsupported.reason, f"training_params.{key}")
        if self.multiply_head_lr != 1:
            logging.getLogger("slipstream").warning(
                "training_params.multiply_head_lr has no effect, as in SuperGradients 3.4 and later; to train some "
                "layers with a different learning rate, set initial_lr to a dict of rates by name prefix"
            )
        for key in (
            "max_epochs",
            "max_train_batches",
            "max_valid_batches",
            "run_validation_freq",
            "run_test_freq",
        ):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ConfigError(f"must be at least 1, not {value}", f"training_params.{key}")
        for key in ("lr_schedule_function", "pre_prediction_callback"):
            if (value := getattr(self, key)) is not None and not callable(value):
                raise ConfigError(f"must be a function, not {value!r}", f"training_params.{key}")


def plain(value: Any) -> Any:
    """Convert an OmegaConf container to dicts and lists with resolved values. Other values are returned unchanged."""
    if type(value).__module__.partition(".")[0] != "omegaconf":
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True)


def _may_be_none(hint: Any) -> bool:
    return hint is Any or (get_origin(hint) is UnionType and type(None) in get_args(hint))


def _with_current_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with older names replaced by their SuperGradients 3 equivalents."""
    for key, current in (("lr_mode", _OLD_SCHEDULES), ("warmup_mode", _OLD_WARMUPS)):
        if isinstance(name := values.get(key), str):
            values[key] = current.get(name, name)
    return values
