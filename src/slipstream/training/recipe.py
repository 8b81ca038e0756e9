"""Translate a SuperGradients recipe, or the arguments of `Trainer.train`, into a Runner's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.files import check_name
from slipstream.registry import MODELS
from slipstream.speed import PARAMS_OPTIONS
from slipstream.training.callbacks import EarlyStop, PrePredictionHook, callback_hooks
from slipstream.training.distillation import check_mode, input_adapter
from slipstream.training.losses import Watched, loss_config, watched_value
from slipstream.training.metrics import metric_config
from slipstream.training.optimizers import optim_wrapper
from slipstream.training.params import TrainingParams, plain
from slipstream.training.schedules import lr_schedules
from slipstream.training.user_schedules import split_decay, split_schedule
from slipstream.typecheck import AllOrPositiveInt, check
from slipstream.visualization import default_backends
from slipstream.zoo.models import LIBRARIES, missing_weights, network_config, unknown_network

_KEYS = (
    "architecture", "arch_params", "checkpoint_params", "ckpt_root_dir", "data_root_dir", "dataset_params",
    "experiment_name", "load_checkpoint", "multi_gpu", "num_classes", "num_gpus", "resume", "run_teacher_on_eval",
    "student_arch_params", "student_architecture", "student_checkpoint_params", "teacher_arch_params",
    "teacher_architecture", "teacher_checkpoint_params", "test_dataloaders", "train_dataloader", "training_hyperparams",
    "training_params", "val_dataloader",
)  # fmt: skip
_CHECKPOINT_KEYS = (
    "checkpoint_num_classes", "checkpoint_path", "checkpoint_sha256", "load_backbone", "load_checkpoint",
    "load_weights_only", "num_workers", "pretrained_weights", "strict_load",
)  # fmt: skip
# Checkpoint keys of SuperGradients 2 and 3; `ckpt_name` also has the default value `ckpt_latest.pth`.
_OLD_CHECKPOINT_KEYS = ("ckpt_name", "external_checkpoint_path", "load_ema_as_net", "source_ckpt_folder_name")
# Network options that appear in older recipes, but that no network uses.
_IGNORED_OPTIONS = ("schema", "strict_load", "sync_bn")
# For example, training_parms raises an error, but my_dataset_params does not.
_MIN_SIMILARITY = 0.92
# Default for `precise_bn_batch_size`, the number of samples used to compute precise BatchNorm statistics.
_PRECISE_BN_SAMPLES = 1024
# Keys of `sg_logger_params`, with the corresponding arguments of `wandb.init`.
_WANDB = {"project_name": "project", "entity": "entity", "wandb_id": "id"}


def recipe_config(recipe: Mapping[str, Any], launcher: str = "none") -> dict[str, Any]:
    """Convert a composed recipe to the keyword arguments of a `Runner`, as built-in Python values.

    Args:
        recipe: result of `slipstream.recipes.compose`, or any mapping with the same keys.
        launcher: the process launcher, as for `Runner`.

    Raises:
        ConfigError: if a key is missing, invalid or not supported. The message names the key.
    """
    _check_keys(recipe)
    gpus(recipe)  # validates multi_gpu and num_gpus; the speed plan sets the parallel wrapper
    distills = recipe.get("architecture") == "kd_module"
    role = "student_" if distills else ""
    network, pretrained = _network_and_weights(recipe, role)
    model = {"network": network, "pretrained": pretrained, "num_classes": network.get("num_classes")}
    return runner_config(
        _require(recipe, "experiment_name"),
        recipe.get("ckpt_root_dir"),
        _training_params(recipe, role),
        {**model, **(_teacher(recipe) if distills else {})},
        _loader(recipe, "train", recipe.get("train_dataloader")),
        _loader(recipe, "val", recipe.get("val_dataloader")),
        _test_loader(recipe),
        launcher,
    )


def gpus(recipe: Mapping[str, Any]) -> int | None:
    """Return the number of devices that a recipe uses: 1 without data parallelism, or None for all available devices.

    Raises:
        ConfigError: if `multi_gpu` or `num_gpus` is invalid.
    """
    mode, count = recipe.get("multi_gpu"), recipe.get("num_gpus")
    name = str(mode or "off").lower().replace("_", "")
    if name in ("off", "none", "cpu"):
        return 1
    if name not in ("ddp", "auto", "distributeddataparallel"):
        raise ConfigError(f"must be DDP, AUTO or Off, not {mode!r}", "multi_gpu")
    if count in (None, -1):
        return None
    return check(count, AllOrPositiveInt, "num_gpus")


def has_full_checkpoint(cfg: Mapping[str, Any]) -> bool:
    """Return whether the network starts from a checkpoint of the whole network rather than a backbone."""
    params = (cfg.get("model") or {}).get("pretrained") or {}
    return bool(params.get("checkpoint_path")) and not params.get("load_backbone")


def _check_keys(recipe: Mapping[str, Any]) -> None:
    if recipe.get("pre_launch_callbacks_list"):
        raise ConfigError("is not supported (quantization); remove it", "pre_launch_callbacks_list")
    # Recipes may define variables in addition to the known keys, so only a key that is almost a known one is an error.
    for key in recipe:
        if key not in _KEYS and (close := get_close_matches(str(key), _KEYS, 1, _MIN_SIMILARITY)):
            raise UnknownNameError(f"unknown key; did you mean '{close[0]}'?", str(key))


def _require(recipe: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := recipe.get(key), str):
        raise ConfigError(f"must be a name, not {value!r}; a base for other recipes cannot be trained", key)
    return value


def _section(recipe: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = recipe.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping, not {value!r}", key)
    return dict(value or {})


def _network_and_weights(recipe: Mapping[str, Any], role: str) -> tuple[dict[str, Any], Any]:
    """Return the configuration of a network, and the arguments of `zoo.models.load`, if any.

    In knowledge distillation, the names of the keys start with `role`: `student_` or `teacher_`.
    """
    name, options = _require(recipe, f"{role}architecture"), _section(recipe, f"{role}arch_params")
    section = f"{role}checkpoint_params"
    params = _section(recipe, section)
    if "num_classes" not in options and recipe.get("num_classes") is not None:
        options["num_classes"] = recipe["num_classes"]
    kept = {key: value for key, value in options.items() if key not in _IGNORED_OPTIONS}
    by_name = params.get("pretrained_weights")
    if by_name and name.startswith(tuple(LIBRARIES)):
        kept["pretrained"] = True
    elif by_name and not (role == "teacher_" and params.get("checkpoint_path")):
        raise ConfigError(missing_weights(by_name), f"{section}.pretrained_weights")
    if not (name.startswith(tuple(LIBRARIES)) or "custom_imports" in recipe or name in MODELS):
        raise UnknownNameError(f"{unknown_network(name)}; or register your own", f"{role}architecture")
    for key, value in params.items():
        if key in _OLD_CHECKPOINT_KEYS and value not in (None, "", False, "ckpt_latest.pth"):
            raise ConfigError("is a legacy key; set checkpoint_path to the file", f"{section}.{key}")
        if key not in (*_CHECKPOINT_KEYS, *_OLD_CHECKPOINT_KEYS):
            raise UnknownNameError(f"unknown key{did_you_mean(key, _CHECKPOINT_KEYS)}", f"{section}.{key}")
    network = network_config(name, kept)
    if not params.get("checkpoint_path"):
        return network, None
    optional = {
        "checkpoint_sha256": params.get("checkpoint_sha256"),
        "other_classes": params.get("checkpoint_num_classes") not in (None, network.get("num_classes")),
    }
    return network, {
        "checkpoint_path": params["checkpoint_path"],
        "strict_load": params.get("strict_load", True),
        "load_backbone": params.get("load_backbone") or False,
        **{key: value for key, value in optional.items() if value},
    }


def _teacher(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `DistillationModel` that describe the teacher."""
    check_mode(recipe.get("run_teacher_on_eval", True))
    network, pretrained = _network_and_weights(recipe, "teacher_")
    if pretrained is None and not network.get("pretrained"):  # timm's networks load their own weights
        raise ConfigError("is required for the teacher", "teacher_checkpoint_params.checkpoint_path")
    adapter = input_adapter(recipe.get("arch_params"), "arch_params")
    return {"teacher": network, "teacher_pretrained": pretrained, **adapter}


def _training_params(recipe: Mapping[str, Any], role: str) -> dict[str, Any]:
    params = {**_section(recipe, "training_hyperparams"), **_section(recipe, "training_params")}
    if not params:
        raise ConfigError("is missing", "training_hyperparams")
    if recipe.get("load_checkpoint") and not params.get("resume"):
        params["resume"] = True
    if "sync_bn" not in params and "sync_bn" in (options := _section(recipe, f"{role}arch_params")):
        params["sync_bn"] = options["sync_bn"]
    return params


def _loader(recipe: Mapping[str, Any], split: str, name: str | None) -> dict[str, Any]:
    from slipstream.training import dataloaders

    params = _section(recipe, "dataset_params")
    dataset = _section(params, f"{split}_dataset_params")
    if dataset.get("list_file"):
        dataset.pop("split", None)  # this default comes from the config group that the recipe extends
    try:
        return dataloaders.config(name, dataset, _section(params, f"{split}_dataloader_params"))
    except ConfigError as error:
        error.path = error.path or f"{split}_dataloader"
        raise


def _test_loader(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    loaders = recipe.get("test_dataloaders")
    if not loaders:
        return None
    names = [loaders] if isinstance(loaders, str) else [*(getattr(loaders, "values", lambda: loaders)())]
    if len(names) != 1:
        raise ConfigError(f"must contain exactly one data loader, not {names}", "test_dataloaders")
    return _loader(recipe, "test", names[0])


# ---- the Runner's configuration ---------------------------------------------------------------------------


def work_dir(experiment_name: str, ckpt_root_dir: str | Path | None) -> str:
    """Return the folder of an experiment: `ckpt_root_dir/experiment_name`. The default root is `work_dirs`.

    Raises:
        ConfigError: if `experiment_name` is a path outside `ckpt_root_dir`.
    """
    check_name(experiment_name, "experiment_name", "ckpt_root_dir")
    return str(Path(ckpt_root_dir or "work_dirs").expanduser() / experiment_name)


def runner_config(
    experiment_name: str,
    ckpt_root_dir: str | Path | None,
    training_params: Mapping[str, Any],
    model: Mapping[str, Any],
    train_dataloader: Any,
    val_dataloader: Any,
    test_dataloader: Any = None,
    launcher: str = "none",
) -> dict[str, Any]:
    """Return the configuration for `Runner.from_cfg`: built-in Python values, except for objects passed as arguments.

    Args:
        experiment_name, ckpt_root_dir: folder of the run; see `work_dir`.
        training_params: SuperGradients' keys (`TrainingParams`).
        model: arguments of `SupervisedModel` or, if they contain a `teacher`, of `DistillationModel`.
        train_dataloader, val_dataloader, test_dataloader: data loaders or their configurations.
        launcher: as for `Runner`.

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
    own_hooks = [*_own_hooks(params, best, "teacher" in model), *filter(None, (schedule_hook, ema_hook))]
    rules = optim.get("paramwise_cfg", {})
    freezes = params.finetune or 0 in rules.get("initial_lr", {}).values()
    changes = {
        "train_metrics": metric_config(params.train_metrics_list, "train_metrics_list"),
        "paramwise_cfg": rules if freezes else None,
        "watched_losses": losses,
    }
    return {
        "experiment_name": experiment_name,
        "work_dir": folder,
        "model": {
            "type": "DistillationModel" if "teacher" in model else "SupervisedModel",
            "loss": loss_config(params.loss, params.criterion_params),
            **{key: value for key, value in {**model, **changes}.items() if value or key == "network"},
        },
        "train_dataloader": _limit_batches(train_dataloader, params.max_train_batches),
        "train_cfg": dict(
            by_epoch=True, max_epochs=params.max_epochs, val_interval=params.run_validation_freq
        ),
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
    cfg = loader if isinstance(loader, Mapping) else {"dataloader": loader}
    return {**cfg, "num_batch_per_epoch": batches}


def _evaluation(mode: str, loader: Any, params: TrainingParams, losses: Sequence[str] = ()) -> dict[str, Any]:
    if loader is None:
        return {}
    evaluator = metric_config(params.valid_metrics_list)
    if losses:
        evaluator.append({"type": "ValidationLoss", "names": list(losses)})
    return {f"{mode}_dataloader": loader, f"{mode}_cfg": {}, f"{mode}_evaluator": evaluator}


def _resume(params: TrainingParams, folder: str) -> bool | str:
    if params.resume_path is not None or not params.resume or params.ckpt_name == TrainingParams.ckpt_name:
        return params.resume_path or params.resume
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
    elif params.sg_logger != "base_sg_logger":
        known = "base_sg_logger, wandb_sg_logger or a visualization backend"
        raise UnknownNameError(f"must be {known}, not '{params.sg_logger}'", "training_params.sg_logger")
    if ignored := given.keys() - {*_WANDB, "monitor_system", "model_name"}:
        logging.getLogger("slipstream").warning("sg_logger_params: %s have no effect", sorted(ignored))
    return {"type": "Visualizer", "vis_backends": backends}


# ---- hooks ------------------------------------------------------------------------------------------------


def _own_hooks(params: TrainingParams, best: Watched | None, teacher: bool) -> list[Any]:
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
    cfg: dict[str, Any] = {"type": "CheckpointHook", "interval": params.run_validation_freq}
    cfg |= {"filename_tmpl": TrainingParams.ckpt_name, "save_epochs": params.save_ckpt_epoch_list}
    if best is not None:
        cfg |= {"save_best": best.name, "rule": _rule(params, best), "best_filename": params.ckpt_best_name}
    return cfg


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
