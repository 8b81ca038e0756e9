"""SuperGradients' `training_params`, and the factory syntax of its recipes: `Name`, `{Name: {...}}`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from slipstream.config import options
from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.typecheck import PositiveInt, matches

_OLD_SCHEDULES = {
    "step": "Step",
    "poly": "Poly",
    "cosine": "Cosine",
    "exp": "Exponential",
    "function": "Function",
}
_OLD_WARMUPS = {"linear_step": "Epoch", "linear_epoch_step": "Epoch", "linear_batch_step": "Batch"}
_BOARD = "TensorBoard is not started automatically; run `tensorboard --logdir` on the run's folder"
_REMOTE = "uploads are not supported; copy the run's folder, or use sg_logger 'wandb_sg_logger'"
# Keys that support only their default value, and the reasons.
UNSUPPORTED = {
    "run_id": "an experiment has a single folder; use a different experiment_name, or set resume_path",
    "resume_from_remote_sg_logger": "downloads are not supported; download the checkpoint and set resume_path",
    "enable_qat": "quantization-aware training is not supported",
    "launch_tensorboard": _BOARD,
    "tensorboard_port": _BOARD,
    "tb_files_user_prompt": "training is not interactive",
    "save_tensorboard_to_s3": _REMOTE,
    "save_tensorboard_remote": _REMOTE,
    "dataset_statistics": "use `slipstream data stats` instead",
}


@dataclass(frozen=True)
class TrainingParams:
    """One field for each SuperGradients key, with the same default value, plus Slipstream's own key `speed`.

    `docs/trainer.md` describes what each key sets.
    """

    # Duration, validation and resuming.
    max_epochs: PositiveInt | None = None
    max_train_batches: PositiveInt | None = None
    max_valid_batches: PositiveInt | None = None
    run_validation_freq: PositiveInt = 1
    run_test_freq: PositiveInt = 1
    seed: int | None = 42
    resume: bool = False
    resume_path: str | None = None
    ckpt_name: str = "ckpt_latest.pth"
    run_id: str | int | None = None
    resume_from_remote_sg_logger: bool = False
    resume_strict_load: bool = False
    load_opt_params: bool = True
    finetune: bool = False

    # Learning rates.
    initial_lr: float | dict[str, Any] | None = None
    lr_mode: str | dict[str, Any] | None = None
    lr_schedule_function: Callable[..., Any] | None = None
    lr_warmup_epochs: int = 0
    lr_warmup_steps: int = 0
    lr_cooldown_epochs: int = 0
    warmup_initial_lr: float | dict[str, Any] | None = None
    warmup_mode: str | None = "LinearEpochLRWarmup"
    lr_updates: list[Any] = field(default_factory=list)
    lr_decay_factor: float | None = None
    step_lr_update_freq: float | None = None
    cosine_final_lr_ratio: float = 0.01
    multiply_head_lr: float = 1

    # Optimizer, loss, metrics.
    optimizer: Any = "SGD"
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    zero_weight_decay_on_bias_and_bn: bool = False
    loss: Any = None
    criterion_params: dict[str, Any] = field(default_factory=dict)
    loss_logging_items_names: list[str] | None = None
    train_metrics_list: list[Any] = field(default_factory=list)
    valid_metrics_list: list[Any] = field(default_factory=list)
    metric_to_watch: str | None = "Accuracy"
    greater_metric_to_watch_is_better: bool = True

    # Options of the speed plan.
    speed: str | dict[str, Any] | None = None
    mixed_precision: bool | str = False
    torch_compile: bool = False
    torch_compile_loss: bool = False
    torch_compile_options: dict[str, Any] = field(default_factory=dict)
    torch_compile_mode: str | None = None
    ema: bool = False
    ema_params: dict[str, Any] = field(default_factory=dict)
    sync_bn: bool = False
    multi_gpu: Any = None
    batch_accumulate: int = 1
    clip_grad_norm: float | None = None
    enable_qat: bool = False
    kill_ddp_pgroup_on_end: bool = True

    # Checkpoints, callbacks and logging.
    save_model: bool = True
    save_ckpt_epoch_list: list[int] = field(default_factory=list)
    ckpt_best_name: str = "ckpt_best.pth"
    average_best_models: bool = True
    precise_bn: bool = False
    precise_bn_batch_size: int | None = None
    phase_callbacks: list[Any] = field(default_factory=list)
    pre_prediction_callback: Callable[..., Any] | None = None
    silent_mode: bool = False
    sg_logger: Any = "base_sg_logger"
    sg_logger_params: dict[str, Any] = field(default_factory=dict)
    launch_tensorboard: bool = False
    tensorboard_port: int | None = None
    tb_files_user_prompt: bool = False
    save_tensorboard_to_s3: bool = False
    save_tensorboard_remote: bool = False
    dataset_statistics: bool = False
    log_installed_packages: bool = True
    save_full_train_log: bool = False

    @classmethod
    def read(cls, mapping: Mapping[str, Any]) -> TrainingParams:
        """Return the parameters. For a key that does not accept None, None selects the default.

        Raises:
            UnknownNameError: if a key does not exist.
            ConfigError: if a value has the wrong type or is not supported.
        """
        if not isinstance(values := plain(mapping), Mapping):
            raise ConfigError(f"must be a dict, not {mapping!r}", "training_params")
        hints = get_type_hints(cls)
        kept = {
            key: value
            for key, value in values.items()
            # `_convert_` is a key of Hydra's `instantiate`.
            if key != "_convert_" and (value is not None or matches(None, hints.get(key, Any)))
        }
        if (mode := kept.get("lr_mode")) in tuple(_OLD_SCHEDULES):
            kept["lr_mode"] = f"{_OLD_SCHEDULES[mode]}LRScheduler"
        if (mode := kept.get("warmup_mode")) in _OLD_WARMUPS:
            kept["warmup_mode"] = f"Linear{_OLD_WARMUPS[mode]}LRWarmup"
        params = options(cls, kept, "training_params")
        params._check()
        return params

    def changed(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults."""
        default = type(self)()
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}

    def _check(self) -> None:
        for key in self.changed():
            if key in UNSUPPORTED:
                raise ConfigError(UNSUPPORTED[key], f"training_params.{key}")
        if self.multiply_head_lr != 1:
            logging.getLogger("slipstream").warning(
                "training_params.multiply_head_lr has no effect, as in SuperGradients 3.4 and later; to train some "
                "layers with a different learning rate, set initial_lr to a dict of rates by name prefix"
            )


def plain(value: Any) -> Any:
    """Convert an OmegaConf container to dicts and lists with resolved values. Other values are returned unchanged."""
    if type(value).__module__.partition(".")[0] != "omegaconf":
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True)


_HYDRA_KEYS = ("_convert_", "_partial_", "_recursive_")


def read_factory(entry: str | Mapping[str, Any], config_path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a component.

    The name is the last part of `_target_`. Nothing is imported.

    Args:
        entry: a name, `{Name: {arguments}}`, or `{_target_: path.to.Name, ...}`.
        config_path: config path of the entry, for error messages.

    Raises:
        ConfigError: if `entry` has none of these forms.
    """
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping):
        kept = {key: value for key, value in entry.items() if key not in _HYDRA_KEYS}
        if isinstance(target := kept.pop("_target_", None), str):
            return target.rpartition(".")[2], kept
        if len(kept) == 1:
            ((name, arguments),) = kept.items()
            if isinstance(name, str) and (arguments is None or isinstance(arguments, Mapping)):
                return name, dict(arguments or {})
    forms = "a name, {Name: {arguments}} or {_target_: path.to.Name, arguments}"
    raise ConfigError(f"must be {forms}, not {entry!r}", config_path)


def configuration(entry: Any, config_path: str) -> Any:
    """Return an entry as a configuration with a `type` key. Configurations and objects are returned unchanged.

    Raises:
        ConfigError: see `read_factory`.
    """
    if not isinstance(entry, str | Mapping) or (isinstance(entry, Mapping) and "type" in entry):
        return entry
    name, arguments = read_factory(entry, config_path)
    return {"type": name, **arguments}


def pop_fixed(arguments: dict[str, Any], supported: Mapping[str, Any], config_path: str) -> None:
    """Remove arguments that support only a single value; raise a ConfigError for other values."""
    for key, value in supported.items():
        if (given := arguments.pop(key, value)) != value:
            raise ConfigError(f"must be {value!r}, not {given!r}", f"{config_path}.{key}")


def default_fill_mask() -> int:
    """Return SuperGradients' default for the `fill_mask` of `SegPadShortToCropSize`, and log a warning."""
    print_log(
        "fill_mask of SegPadShortToCropSize is not set, so the padding has class 0, as in SuperGradients. If class 0 "
        "is not the background, set fill_mask to the loss's ignore_index",
        "current",
        logging.WARNING,
    )
    return 0
