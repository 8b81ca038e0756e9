"""Translate a SuperGradients recipe into a Runner's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.registry import MODELS
from slipstream.training.kd_recipe import KEYS as KD_KEYS
from slipstream.training.kd_recipe import is_distillation, renamed_paths, student_recipe, teacher_arguments
from slipstream.training.tasks import check_task
from slipstream.zoo.models import missing_weights, network_config, unknown_network
from slipstream.zoo.timm_networks import PREFIX

__all__ = ["gpus", "has_full_checkpoint", "recipe_config"]

_KEYS = (
    "architecture", "arch_params", "checkpoint_params", "ckpt_root_dir", "data_root_dir", "dataset_params",
    "experiment_name", "load_checkpoint", "multi_gpu", "num_classes", "num_gpus", "resume", "test_dataloaders",
    "train_dataloader", "training_hyperparams", "training_params", "val_dataloader", *KD_KEYS,
)  # fmt: skip
# SuperGradients recipe keys that do not affect a run.
_UNUSED = (
    "data_loader_num_workers", "dataset_name", "dataset_interface", "device", "model_checkpoints_location",
    "multi_gpu_mode", "project_name", "sg_logger",
)  # fmt: skip
_CHECKPOINT_KEYS = (
    "checkpoint_num_classes", "checkpoint_path", "checkpoint_sha256", "load_backbone", "load_checkpoint",
    "load_weights_only", "num_workers", "pretrained_weights", "strict_load",
)  # fmt: skip
# Checkpoint keys of SuperGradients 2 and 3, each with its accepted value and the remedy for other values.
_OLD_CHECKPOINT_KEYS = {
    "ckpt_name": ("ckpt_latest.pth", "set checkpoint_path to the file"),
    "external_checkpoint_path": (None, "use checkpoint_path"),
    "load_ema_as_net": (
        False,
        "remove it; state_dict in a checkpoint already contains the EMA weights, if any",
    ),
    "source_ckpt_folder_name": (None, "set checkpoint_path to the file"),
}
# Network options that appear in older recipes, but that no network uses.
_IGNORED_OPTIONS = ("schema", "strict_load", "sync_bn")
_MIN_SIMILARITY = 0.92
"""An unknown section is an error if the similarity of its name to a known name is at least this value. For example,
training_parms raises an error, but my_dataset_params only logs a warning."""
_SINGLE_PROCESS_MODES = (None, False, "off", "none", "cpu")
_DDP_MODES = ("ddp", "auto", "distributed_data_parallel", "distributeddataparallel")


def recipe_config(recipe: Mapping[str, Any], launcher: str = "none") -> dict[str, Any]:
    """Convert a composed recipe to the keyword arguments of a `Runner`, as built-in Python values.

    Args:
        recipe: result of `slipstream.recipes.compose`, or any mapping with the same keys.
        launcher: the process launcher, as for `Runner`.

    Raises:
        ConfigError: if a key is missing, invalid or not supported. The message names the key.
    """
    from slipstream.training.translate import runner_config

    check_task(recipe)
    _check_keys(recipe)
    gpus(recipe)  # validates multi_gpu and num_gpus; the speed plan sets the parallel wrapper
    teacher = teacher_arguments(recipe, _network_and_weights) if is_distillation(recipe) else None
    recipe = student_recipe(recipe) if teacher else recipe
    with renamed_paths("student" if teacher else None):
        network, pretrained = _network_and_weights(recipe)
    return runner_config(
        experiment_name=_require(recipe, "experiment_name", str),
        ckpt_root_dir=recipe.get("ckpt_root_dir"),
        network=network,
        training_params=_training_params(recipe),
        train_dataloader=_loader(recipe, "train", recipe.get("train_dataloader")),
        val_dataloader=_loader(recipe, "val", recipe.get("val_dataloader")),
        test_dataloader=_test_loader(recipe),
        pretrained=pretrained,
        num_classes=network.get("num_classes"),
        launcher=launcher,
        teacher=teacher,
    )


def gpus(recipe: Mapping[str, Any]) -> int | None:
    """Return the number of devices that a recipe uses: 1 without data parallelism, or None for all available devices.

    Raises:
        ConfigError: if `multi_gpu` or `num_gpus` is invalid.
    """
    mode, count = recipe.get("multi_gpu"), recipe.get("num_gpus")
    mode_name = mode.lower() if isinstance(mode, str) else mode
    if mode_name in _SINGLE_PROCESS_MODES:
        return 1
    if mode_name not in _DDP_MODES:
        raise ConfigError(f"must be DDP, AUTO or Off, not {mode!r}", "multi_gpu")
    if count in (None, -1):
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"must be a number of GPUs, or -1 for all, not {count!r}", "num_gpus")
    return count


def has_full_checkpoint(cfg: Mapping[str, Any]) -> bool:
    """Return whether the network starts from a checkpoint of the whole network rather than a backbone."""
    params = cfg.get("model", {}).get("pretrained") or {}
    return bool(params.get("checkpoint_path")) and not params.get("load_backbone")


def _check_keys(recipe: Mapping[str, Any]) -> None:
    for key, value in recipe.items():
        if key in (*_KEYS, *_UNUSED) or not (hint := did_you_mean(str(key), _KEYS)):
            continue
        if isinstance(value, Mapping) and get_close_matches(str(key), _KEYS, cutoff=_MIN_SIMILARITY):
            raise UnknownNameError(f"unknown section{hint}", str(key))
        # Recipes may define variables in addition to the known keys, so an unknown key is not an error.
        logging.getLogger("slipstream").warning("unknown recipe key '%s'%s", key, hint)


def _require(recipe: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(value := recipe.get(key), kind):
        problem = "is missing" if value is None else f"must be a {kind.__name__}, not {value!r}"
        raise ConfigError(problem, key)
    return value


def _section(recipe: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = recipe.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping, not {value!r}", key)
    return dict(value or {})


def _network(recipe: Mapping[str, Any]) -> dict[str, Any]:
    options = _section(recipe, "arch_params")
    if "num_classes" not in options and recipe.get("num_classes") is not None:
        options["num_classes"] = recipe["num_classes"]
    kept = {key: value for key, value in options.items() if key not in _IGNORED_OPTIONS}
    if _asks_for_timm_weights(recipe):
        kept["pretrained"] = True
    name = _require(recipe, "architecture", str)
    if not (name.startswith(PREFIX) or "custom_imports" in recipe or name in MODELS):
        raise UnknownNameError(
            f"{unknown_network(name)}; for your own network, register its class", "architecture"
        )
    return network_config(name, kept)


def _asks_for_timm_weights(recipe: Mapping[str, Any]) -> bool:
    is_timm = str(recipe.get("architecture")).startswith(PREFIX)
    return is_timm and bool(_section(recipe, "checkpoint_params").get("pretrained_weights"))


def _network_and_weights(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    network = _network(recipe)
    return network, _pretrained(recipe, network.get("num_classes"))


def _training_params(recipe: Mapping[str, Any]) -> dict[str, Any]:
    params = {**_section(recipe, "training_hyperparams"), **_section(recipe, "training_params")}
    if not params:
        raise ConfigError("is missing", "training_hyperparams")
    if recipe.get("load_checkpoint") and not params.get("resume"):
        params["resume"] = True
    if "sync_bn" not in params and "sync_bn" in (options := _section(recipe, "arch_params")):
        params["sync_bn"] = options["sync_bn"]
    return params


def _pretrained(recipe: Mapping[str, Any], num_classes: int | None) -> dict[str, Any] | None:
    params = _section(recipe, "checkpoint_params")
    for key, (default, remedy) in _OLD_CHECKPOINT_KEYS.items():
        if params.pop(key, None) not in (None, "", default):
            raise ConfigError(f"is a legacy SuperGradients key; {remedy}", f"checkpoint_params.{key}")
    for key in params:
        if key not in _CHECKPOINT_KEYS:
            hint = did_you_mean(str(key), _CHECKPOINT_KEYS)
            raise UnknownNameError(f"unknown key{hint}", f"checkpoint_params.{key}")
    if params.get("pretrained_weights") and not _asks_for_timm_weights(recipe):
        raise ConfigError(
            missing_weights(params["pretrained_weights"]), "checkpoint_params.pretrained_weights"
        )
    if not params.get("checkpoint_path"):
        return None
    return {
        "checkpoint_path": params["checkpoint_path"],
        "strict_load": params.get("strict_load", True),
        "load_backbone": params.get("load_backbone") or False,
        **({"checkpoint_sha256": params["checkpoint_sha256"]} if params.get("checkpoint_sha256") else {}),
        **(
            {"other_classes": True} if params.get("checkpoint_num_classes") not in (None, num_classes) else {}
        ),
    }


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
    several = loaders.values() if isinstance(loaders, Mapping) else loaders
    names = [loaders] if isinstance(loaders, str) else list(several)
    if len(names) != 1:
        raise ConfigError(
            f"must contain exactly one test data loader, not {len(names)}: {names}", "test_dataloaders"
        )
    return _loader(recipe, "test", names[0])
