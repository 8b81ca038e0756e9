"""Translate SuperGradients' `training_params`, network and loaders into a Runner's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.files import check_name
from slipstream.speed import PARAMS_OPTIONS
from slipstream.training.callbacks import EarlyStop, callback_hooks
from slipstream.training.ema_decay import split_decay
from slipstream.training.hooks import PrePredictionHook
from slipstream.training.losses import Watched, loss_config, watched_value
from slipstream.training.lr_callbacks import split_schedule
from slipstream.training.metrics import metric_config
from slipstream.training.optimizers import optim_wrapper
from slipstream.training.params import TrainingParams, plain
from slipstream.training.schedules import lr_schedules
from slipstream.visualization import default_backends

__all__ = ["runner_config", "work_dir"]

_PRECISE_BN_SAMPLES = 1024
"""Default for `precise_bn_batch_size`, the number of samples used to compute precise BatchNorm statistics."""
_WANDB = {"project_name": "project", "entity": "entity", "wandb_id": "id"}
"""Keys of `sg_logger_params`, with the corresponding arguments of `wandb.init`."""
_LOGGERS = ("base_sg_logger", "wandb_sg_logger")


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
    folder = work_dir(experiment_name, ckpt_root_dir)
    optim, best = optim_wrapper(params), _best(params)
    callbacks = callback_hooks(params.phase_callbacks)
    losses = _validated_losses(params, best, callbacks) if val_dataloader is not None else []
    own_hooks = [*_own_hooks(params, best, teacher), *filter(None, (schedule_hook, ema_hook))]
    rules = optim.get("paramwise_cfg", {})
    freezes = params.finetune or 0 in rules.get("initial_lr", {}).values()
    model = {
        "pretrained": dict(pretrained) if pretrained else None,
        "train_metrics": metric_config(params.train_metrics_list, "train_metrics_list"),
        "num_classes": num_classes,
        "paramwise_cfg": rules if freezes else None,
        "watched_losses": losses,
    }
    return {
        "experiment_name": experiment_name,
        "work_dir": folder,
        "model": {
            "type": "SupervisedModel",
            "network": network,
            "loss": loss_config(params.loss, params.criterion_params),
            **{key: value for key, value in model.items() if value},
            **({"type": "DistillationModel", **teacher} if teacher else {}),
        },
        "train_dataloader": _limit_batches(train_dataloader, params.max_train_batches),
        "train_cfg": {
            "by_epoch": True,
            "max_epochs": params.max_epochs,
            "val_interval": params.run_validation_freq,
        },
        "optim_wrapper": optim,
        "param_scheduler": lr_schedules(params),
        **_evaluation("val", _limit_batches(val_dataloader, params.max_valid_batches), params, losses),
        **_evaluation("test", test_dataloader, params),
        "default_hooks": {"checkpoint": _checkpoint(params, best)},
        "custom_hooks": [*own_hooks, *callbacks],
        "randomness": {"seed": params.seed},
        "resume": _resume(params, folder),
        "launcher": launcher,
        "log_level": "WARNING" if params.silent_mode else "INFO",
        "visualizer": _visualizer(params, experiment_name),
        # The options of the speed plan. Default values are omitted, because recipes list all keys.
        "training_params": {key: v for key, v in params.changed().items() if key in PARAMS_OPTIONS},
    }


def _limit_batches(loader: Any, batches: int | None) -> Any:
    """Return the loader, or its configuration, limited to `batches` batches per epoch."""
    if batches is None or loader is None:
        return loader
    return {
        **(loader if isinstance(loader, Mapping) else {"dataloader": loader}),
        "num_batch_per_epoch": batches,
    }


def _evaluation(mode: str, loader: Any, params: TrainingParams, losses: Sequence[str] = ()) -> dict[str, Any]:
    if loader is None:
        return {}
    evaluator = metric_config(params.valid_metrics_list)
    if losses:
        evaluator.append({"type": "ValidationLoss", "names": list(losses)})
    return {f"{mode}_dataloader": loader, f"{mode}_cfg": {}, f"{mode}_evaluator": evaluator}


def _resume(params: TrainingParams, folder: str) -> bool | str:
    if params.resume_path is not None:
        return params.resume_path
    if not params.resume or params.ckpt_name == TrainingParams.ckpt_name:
        return params.resume
    return str(Path(folder) / check_name(params.ckpt_name, "training_params.ckpt_name"))


def _visualizer(params: TrainingParams, experiment_name: str) -> dict[str, Any]:
    """Return the configuration of a visualizer with the default backends and the tracker that `sg_logger` selects."""
    backends: list[Any] = [*default_backends()]
    given = {key: value for key, value in params.sg_logger_params.items() if value}
    if not isinstance(params.sg_logger, str):
        backends.append(params.sg_logger)  # a backend or its configuration
    elif params.sg_logger == "wandb_sg_logger":
        renamed = {_WANDB[key]: value for key, value in given.items() if key in _WANDB}
        backends.append({"type": "WandbVisBackend", "init_kwargs": {"name": experiment_name, **renamed}})
    elif params.sg_logger not in _LOGGERS:
        raise UnknownNameError(
            f"no logger is named '{params.sg_logger}'{did_you_mean(params.sg_logger, _LOGGERS)}; use "
            f"{' or '.join(_LOGGERS)}, or a visualization backend, such as {{'type': 'MLflowVisBackend'}}",
            "training_params.sg_logger",
        )
    ignored = given.keys() - {*_WANDB, "monitor_system", "model_name"}
    if ignored:
        logging.getLogger("slipstream").warning(
            "training_params.sg_logger_params: %s has no effect; files are saved only in the run's folder, on which "
            "you can run `tensorboard --logdir`",
            ", ".join(sorted(ignored)),
        )
    return {"type": "Visualizer", "vis_backends": backends}


# ---- hooks ------------------------------------------------------------------------------------------------


def _own_hooks(params: TrainingParams, best: Watched | None, teacher: Mapping[str, Any] | None) -> list[Any]:
    hooks: list[Any] = [{"type": "TeacherHook"}] if teacher else []
    if params.train_metrics_list:
        hooks.append({"type": "TrainMetricsHook"})
    if not params.load_opt_params:
        hooks.append({"type": "NewOptimizerHook"})
    if params.pre_prediction_callback is not None:
        hooks.append(PrePredictionHook(params.pre_prediction_callback))
    if params.precise_bn:
        samples = params.precise_bn_batch_size or _PRECISE_BN_SAMPLES
        hooks.append({"type": "PreciseBNHook", "num_samples": samples})
    if params.average_best_models and params.save_model and best is not None:
        hooks.append({"type": "AverageBestHook", "metric": best.name, "rule": _rule(params, best)})
    return hooks


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
    watched_values = [] if best is None else [best]
    for schedule in lr_schedules(params):
        if schedule["type"] == "ReduceOnPlateauLR":
            watched_values.append(watched_value(schedule["monitor"], params, "training_params.lr_mode"))
    for index, hook in enumerate(callbacks):
        path = f"training_params.phase_callbacks[{index}].monitor"
        if isinstance(hook, EarlyStop):
            watched_values.append(watched_value(hook.monitor, params, path))
            hook.monitor = watched_values[-1].name
        elif isinstance(hook, dict) and hook.get("type") == "EarlyStop":
            watched_values.append(watched_value(str(hook.get("monitor")), params, path))
            hook["monitor"] = watched_values[-1].name
    return list(dict.fromkeys(watched.name for watched in watched_values if watched.is_loss))
