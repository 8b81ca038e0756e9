"""Translate a SuperGradients recipe into a Runner's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.recipes.compose import check_task
from slipstream.registry import MODELS
from slipstream.training.distillation import check_mode, input_adapter
from slipstream.zoo.models import missing_weights, network_config, unknown_network
from slipstream.zoo.timm_networks import PREFIX

__all__ = ["gpus", "has_full_checkpoint", "recipe_config"]

_KEYS = (
    "architecture", "arch_params", "checkpoint_params", "ckpt_root_dir", "data_root_dir", "dataset_params",
    "experiment_name", "load_checkpoint", "multi_gpu", "num_classes", "num_gpus", "resume", "run_teacher_on_eval",
    "student_arch_params", "student_architecture", "student_checkpoint_params", "teacher_arch_params",
    "teacher_architecture", "teacher_checkpoint_params", "test_dataloaders", "train_dataloader", "training_hyperparams",
    "training_params", "val_dataloader",
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
_OLD_CHECKPOINT_KEYS = ("ckpt_name", "external_checkpoint_path", "load_ema_as_net", "source_ckpt_folder_name")
"""Checkpoint keys of SuperGradients 2 and 3; `ckpt_name` also has the default value `ckpt_latest.pth`."""
_IGNORED_OPTIONS = ("schema", "strict_load", "sync_bn")
"""Network options that appear in older recipes, but that no network uses."""
_MIN_SIMILARITY = 0.92
"""An unknown section is an error if the similarity of its name to a known name is at least this value. For example,
training_parms raises an error, but my_dataset_params only logs a warning."""


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
    distills = recipe.get("architecture") == "kd_module"
    role = "student_" if distills else ""
    network, pretrained = _network_and_weights(recipe, role)
    return runner_config(
        experiment_name=_require(recipe, "experiment_name"),
        ckpt_root_dir=recipe.get("ckpt_root_dir"),
        network=network,
        training_params=_training_params(recipe, role),
        train_dataloader=_loader(recipe, "train", recipe.get("train_dataloader")),
        val_dataloader=_loader(recipe, "val", recipe.get("val_dataloader")),
        test_dataloader=_test_loader(recipe),
        pretrained=pretrained,
        num_classes=network.get("num_classes"),
        launcher=launcher,
        teacher=_teacher(recipe) if distills else None,
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


def _require(recipe: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := recipe.get(key), str):
        raise ConfigError(f"must be a name, not {value!r}; a base for other recipes cannot be trained", key)
    return value


def _section(recipe: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = recipe.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping, not {value!r}", key)
    return dict(value or {})


def _network_and_weights(
    recipe: Mapping[str, Any], role: str = ""
) -> tuple[dict[str, Any], dict[str, Any] | None]:
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
    if by_name and name.startswith(PREFIX):
        kept["pretrained"] = True
    elif by_name and not (role == "teacher_" and params.get("checkpoint_path")):
        raise ConfigError(missing_weights(by_name), f"{section}.pretrained_weights")
    if not (name.startswith(PREFIX) or "custom_imports" in recipe or name in MODELS):
        raise UnknownNameError(
            f"{unknown_network(name)}; to use your own, register it", f"{role}architecture"
        )
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
        raise ConfigError(
            "is required: the teacher must be trained", "teacher_checkpoint_params.checkpoint_path"
        )
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
