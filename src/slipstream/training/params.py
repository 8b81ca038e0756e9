"""The `training_params` of SuperGradients: every key, its type, its default, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.typecheck import describe, matches

__all__ = ["Refused", "TrainingParams", "plain"]

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
_DROPPED = ("_convert_",)
"""What Hydra's own `instantiate` reads."""


@dataclass(frozen=True)
class Refused:
    """Why anything but the default of a key is an error."""

    why: str


_REMOTE = Refused("nothing is uploaded: copy the run's folder, or take sg_logger 'wandb_sg_logger'")
_BOARD = Refused("no TensorBoard is started: run `tensorboard --logdir` on the run's folder")
_PLAN = "SpeedPlan"


@dataclass(frozen=True)
class TrainingParams:
    """A field for each key, with SuperGradients' default.

    The text beside a field's type says what the key becomes: an argument of the `Runner`, a hook, an option.
    A `Refused` key is known, and nothing but its default can be honoured.
    """

    # How long, and from where.
    max_epochs: Annotated[int | None, "train_cfg.max_epochs"] = None
    max_train_batches: Annotated[int | None, "train_dataloader.num_batch_per_epoch"] = None
    max_valid_batches: Annotated[int | None, "val_dataloader.num_batch_per_epoch"] = None
    run_validation_freq: Annotated[int, "train_cfg.val_interval"] = 1
    run_test_freq: Annotated[int, "how often test_loaders are evaluated (a hook)"] = 1
    seed: Annotated[int | None, "randomness.seed"] = 42
    resume: Annotated[bool, "resume"] = False
    resume_path: Annotated[str | None, "resume"] = None
    ckpt_name: Annotated[str, "resume: the file to go on from in the run's folder"] = "ckpt_latest.pth"
    run_id: Annotated[
        str | int | None,
        Refused("an experiment has one folder: name another experiment, or give resume_path"),
    ] = None
    resume_from_remote_sg_logger: Annotated[
        bool, Refused("nothing is downloaded: fetch the checkpoint and give resume_path")
    ] = False
    resume_strict_load: Annotated[bool, "nothing: a resumed run always needs all of its weights"] = False
    load_opt_params: Annotated[bool, "a hook: False lets a resumed run's optimizer begin anew"] = True
    finetune: Annotated[
        bool, "initial_lr, by the network's get_finetune_lr_dict: its heads learn, the rest is frozen"
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
        float, Refused("no network reads it since SuperGradients 3.4: give initial_lr by name prefixes")
    ] = 1

    # Optimizer, loss, metrics.
    optimizer: Annotated[Any, "optim_wrapper"] = "SGD"
    optimizer_params: Annotated[dict[str, Any], "optim_wrapper"] = field(default_factory=dict)
    zero_weight_decay_on_bias_and_bn: Annotated[bool, "optim_wrapper"] = False
    loss: Annotated[Any, "model.loss"] = None
    criterion_params: Annotated[dict[str, Any], "model.loss"] = field(default_factory=dict)
    loss_logging_items_names: Annotated[
        list[str] | None, "nothing: losses are logged by the names that the loss itself gives them"
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
    enable_qat: Annotated[bool, Refused("quantisation-aware training is not available")] = False
    kill_ddp_pgroup_on_end: Annotated[bool, "nothing: the processes end with whoever started them"] = True

    # What is kept and shown.
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
    tb_files_user_prompt: Annotated[bool, Refused("nothing is asked while it runs")] = False
    save_tensorboard_to_s3: Annotated[bool, _REMOTE] = False
    save_tensorboard_remote: Annotated[bool, _REMOTE] = False
    dataset_statistics: Annotated[bool, Refused("run `slipstream data stats` on the data set")] = False
    log_installed_packages: Annotated[bool, "nothing: the log begins with the versions that matter"] = True
    save_full_train_log: Annotated[bool, "nothing: the log file holds everything, errors too"] = False

    @classmethod
    def read(cls, mapping: Mapping[str, Any]) -> TrainingParams:
        """Return the parameters; a key with no value (None) means its default.

        Raises:
            UnknownNameError: a key that does not exist.
            ConfigError: a value of a wrong type, or one that cannot be honoured.
        """
        if not isinstance(given := plain(mapping), Mapping):
            raise ConfigError(f"must be a dict, not {mapping!r}", "training_params")
        values = {key: value for key, value in given.items() if key not in _DROPPED}
        hints, known = get_type_hints(cls), [f.name for f in fields(cls)]
        for key, value in values.items():
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise UnknownNameError(f"there is no such key{hint}", f"training_params.{key}")
            if value is not None and not matches(value, hints[key]):
                raise ConfigError(f"must be {describe(hints[key])}, not {value!r}", f"training_params.{key}")
        kept = {key: v for key, v in values.items() if v is not None or _may_be_none(hints[key])}
        params = cls(**_in_new_words(kept))
        params._check()
        return params

    @classmethod
    def table(cls) -> dict[str, str | Refused]:
        """Return for each key what it becomes, or why nothing but its default is accepted."""
        hints = get_type_hints(cls, include_extras=True)
        return {f.name: hints[f.name].__metadata__[0] for f in fields(cls)}

    def given(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults."""
        default = type(self)()
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}

    def _check(self) -> None:
        table = self.table()
        for key in self.given():
            if isinstance(refused := table[key], Refused):
                raise ConfigError(refused.why, f"training_params.{key}")
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
    """Return an OmegaConf container as dicts and lists, with its interpolations resolved; others as they are."""
    if type(value).__module__.partition(".")[0] != "omegaconf":
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True)


def _may_be_none(hint: Any) -> bool:
    return hint is Any or (get_origin(hint) is UnionType and type(None) in get_args(hint))


def _in_new_words(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the spellings of SuperGradients 3 in place of older ones."""
    for key, words in (("lr_mode", _OLD_SCHEDULES), ("warmup_mode", _OLD_WARMUPS)):
        if isinstance(word := values.get(key), str):
            values[key] = words.get(word, word)
    return values
