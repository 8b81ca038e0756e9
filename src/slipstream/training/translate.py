"""Translate SuperGradients' `training_params`, network and loaders into a Runner's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.files import check_name
from slipstream.hooks import Hook
from slipstream.speed import PARAMS_OPTIONS
from slipstream.training.callbacks import EarlyStop, callback_hooks
from slipstream.training.config_paths import LAST_OWN_HOOK
from slipstream.training.ema_decay import split_decay
from slipstream.training.hooks import PrePredictionHook
from slipstream.training.losses import loss_config
from slipstream.training.lr_callbacks import split_schedule
from slipstream.training.metrics import metric_config
from slipstream.training.optimizers import optim_wrapper
from slipstream.training.params import TrainingParams, plain
from slipstream.training.schedules import lr_schedules
from slipstream.training.trackers import visualizer
from slipstream.training.watched import Watched, watched_value

__all__ = ["runner_config", "work_dir"]

_PRECISE_BN_SAMPLES = 1024
"""Default for `precise_bn_batch_size`, the number of samples used to compute precise BatchNorm statistics."""


def work_dir(experiment_name: str, ckpt_root_dir: str | Path | None) -> str:
    """Return the folder of an experiment: `ckpt_root_dir/experiment_name`. The default root is `work_dirs`.

    Raises:
        ConfigError: if `experiment_name` is a path outside `ckpt_root_dir`.
    """
    check_name(experiment_name, "experiment_name", "ckpt_root_dir")
    return str(Path(ckpt_root_dir or "work_dirs").expanduser() / experiment_name)


def runner_config(
    *,
    experiment_name: str,
    ckpt_root_dir: str | Path | None,
    network: nn.Module | Mapping[str, Any],
    training_params: Mapping[str, Any],
    train_dataloader: Any,
    val_dataloader: Any,
    test_dataloader: Any = None,
    pretrained: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    launcher: str = "none",
    teacher: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the configuration for `Runner.from_cfg`: built-in Python values, except for objects passed as arguments.

    Args:
        experiment_name, ckpt_root_dir: folder of the run; see `work_dir`.
        network: a module or its configuration.
        training_params: SuperGradients' keys (`TrainingParams`).
        train_dataloader, val_dataloader, test_dataloader: data loaders or their configurations.
        pretrained: arguments of `zoo.models.load`, which loads the initial weights.
        num_classes: the network's number of classes, if known.
        launcher: as for `Runner`.
        teacher: for knowledge distillation, the arguments of `DistillationModel` that describe the teacher.

    Raises:
        UnknownNameError, ConfigError: if a key or value is invalid or not supported. The message names its path
            in `training_params`.
    """
    plain_params, schedule_hook = split_schedule(plain(training_params))
    params, ema_hook = split_decay(TrainingParams.read(plain_params))
    if params.max_epochs is None:
        raise ConfigError("is required", "training_params.max_epochs")
    optim, best = optim_wrapper(params), _best(params)
    callbacks = callback_hooks(params.phase_callbacks)
    losses = _validated_losses(params, best, callbacks) if val_dataloader is not None else []
    return {
        "experiment_name": experiment_name,
        "work_dir": work_dir(experiment_name, ckpt_root_dir),
        "model": {
            **_model(params, network, pretrained, num_classes, optim.get("paramwise_cfg", {})),
            **({"type": "DistillationModel", **teacher} if teacher else {}),
            **({"watched_losses": losses} if losses else {}),
        },
        **_training(train_dataloader, params),
        "optim_wrapper": optim,
        "param_scheduler": lr_schedules(params),
        **_evaluation("val", _limit_batches(val_dataloader, params.max_valid_batches), params, losses),
        **_evaluation("test", test_dataloader, params),
        "default_hooks": {"checkpoint": _checkpoint(params, best)},
        "custom_hooks": [*_own_hooks(params, best, teacher, (schedule_hook, ema_hook)), *callbacks],
        "randomness": {"seed": params.seed},
        "resume": _resume(params, work_dir(experiment_name, ckpt_root_dir)),
        "launcher": launcher,
        "log_level": "WARNING" if params.silent_mode else "INFO",
        "visualizer": visualizer(params, experiment_name),
        "training_params": _options(params),
    }


def _model(
    params: TrainingParams,
    network: nn.Module | Mapping[str, Any],
    pretrained: Mapping[str, Any] | None,
    num_classes: int | None,
    rules: Mapping[str, Any],
) -> dict[str, Any]:
    freezes = params.finetune or 0 in rules.get("initial_lr", {}).values()
    optional = {
        "pretrained": dict(pretrained) if pretrained else None,
        "train_metrics": metric_config(params.train_metrics_list, "train_metrics_list"),
        "num_classes": num_classes,
        "paramwise_cfg": rules if freezes else None,
    }
    return {
        "type": "SupervisedModel",
        "network": network,
        "loss": loss_config(params.loss, params.criterion_params),
        **{key: value for key, value in optional.items() if value},
    }


def _limit_batches(loader: Any, batches: int | None) -> Any:
    """Return the loader, or its configuration, limited to `batches` batches per epoch."""
    if batches is None or loader is None:
        return loader
    if isinstance(loader, Mapping):
        return {**loader, "num_batch_per_epoch": batches}
    return {"dataloader": loader, "num_batch_per_epoch": batches}


def _training(loader: Any, params: TrainingParams) -> dict[str, Any]:
    cfg = {"by_epoch": True, "max_epochs": params.max_epochs, "val_interval": params.run_validation_freq}
    return {"train_dataloader": _limit_batches(loader, params.max_train_batches), "train_cfg": cfg}


def _evaluation(mode: str, loader: Any, params: TrainingParams, losses: Sequence[str] = ()) -> dict[str, Any]:
    if loader is None:
        return {}
    evaluator = metric_config(params.valid_metrics_list)
    if losses:
        evaluator.append({"type": "ValidationLoss", "names": list(losses)})
    return {f"{mode}_dataloader": loader, f"{mode}_cfg": {}, f"{mode}_evaluator": evaluator}


def _options(params: TrainingParams) -> dict[str, Any]:
    """Return the options for the speed plan. Default values are omitted, because recipes list all keys."""
    return {key: value for key, value in params.changed().items() if key in PARAMS_OPTIONS}


def _resume(params: TrainingParams, folder: str) -> bool | str:
    if params.resume_path is not None:
        return params.resume_path
    if not params.resume or params.ckpt_name == TrainingParams.ckpt_name:
        return params.resume
    return str(Path(folder) / check_name(params.ckpt_name, "training_params.ckpt_name"))


# ---- hooks ------------------------------------------------------------------------------------------------


def _own_hooks(
    params: TrainingParams,
    best: Watched | None,
    teacher: Mapping[str, Any] | None,
    user_hooks: Sequence[Hook | None],
) -> list[Any]:
    """Return the hooks that the translation inserts before those of `phase_callbacks`."""
    hooks: list[Any] = [{"type": "TeacherHook"}] if teacher else []
    if params.train_metrics_list:
        hooks.append({"type": "TrainMetricsHook"})
    if not params.load_opt_params:
        hooks.append({"type": "NewOptimizerHook"})
    if params.pre_prediction_callback is not None:
        hooks.append(PrePredictionHook(params.pre_prediction_callback))
    if params.precise_bn:
        hooks.append(
            {"type": "PreciseBNHook", "num_samples": params.precise_bn_batch_size or _PRECISE_BN_SAMPLES}
        )
    if params.average_best_models and params.save_model and best is not None:
        hooks.append({"type": "AverageBestHook", "metric": best.name, "rule": _rule(params, best)})
    return [*hooks, *filter(None, user_hooks), {"type": LAST_OWN_HOOK}]


def _checkpoint(params: TrainingParams, best: Watched | None) -> dict[str, Any] | None:
    if not params.save_model:
        return None
    saved: dict[str, Any] = {}
    if best is not None:
        saved = {"save_best": best.name, "rule": _rule(params, best), "best_filename": params.ckpt_best_name}
    return {
        "type": "CheckpointHook",
        "interval": params.run_validation_freq,
        "filename_tmpl": TrainingParams.ckpt_name,
        "save_epochs": params.save_ckpt_epoch_list,
        **saved,
    }


def _best(params: TrainingParams) -> Watched | None:
    """Return the metric or loss that determines the best checkpoint, or None if no value is watched.

    Raises:
        UnknownNameError: if there are metrics, but `metric_to_watch` is not the name of a metric or a loss.
    """
    if params.metric_to_watch is None:
        return None
    try:
        return watched_value(params.metric_to_watch, params, "training_params.metric_to_watch")
    except UnknownNameError:
        if not params.valid_metrics_list:
            return None
        raise


def _rule(params: TrainingParams, watched: Watched) -> str:
    """Return 'greater' if higher values are better, otherwise 'less'. For a loss, lower values are always better."""
    return "greater" if params.greater_metric_to_watch_is_better and not watched.is_loss else "less"


def _validated_losses(params: TrainingParams, best: Watched | None, callbacks: Sequence[Any]) -> list[str]:
    """Return the names of the losses that the best checkpoint, the schedules or `EarlyStop` require.

    Raises:
        UnknownNameError: if `EarlyStop` monitors a value that does not exist.
    """
    watched_values = [best] if best is not None else []
    for schedule in lr_schedules(params):
        if schedule["type"] == "ReduceOnPlateauLR":
            monitor = schedule["monitor"]
            watched_values.append(watched_value(monitor, params, "training_params.lr_mode"))
    for index, hook in enumerate(callbacks):
        path = f"training_params.phase_callbacks[{index}].monitor"
        if isinstance(hook, EarlyStop):
            watched_values.append(watched_value(hook.monitor, params, path))
            hook.monitor = watched_values[-1].name
        elif (
            isinstance(hook, dict)
            and hook.get("type") == "EarlyStop"
            and isinstance(hook.get("monitor"), str)
        ):
            watched_values.append(watched_value(hook["monitor"], params, path))
            hook["monitor"] = watched_values[-1].name
    return list(dict.fromkeys(watched.name for watched in watched_values if watched.is_loss))
