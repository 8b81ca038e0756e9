"""A whole recipe in SuperGradients' words as the configuration of a Runner."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean

__all__ = ["gpus", "pretrained_whole", "recipe_config"]

_KEYS = (
    "architecture", "arch_params", "checkpoint_params", "ckpt_root_dir", "data_root_dir", "dataset_params",
    "experiment_name", "load_checkpoint", "multi_gpu", "num_classes", "num_gpus", "resume", "test_dataloaders",
    "train_dataloader", "training_hyperparams", "training_params", "val_dataloader",
)  # fmt: skip
# SuperGradients' recipes have them, and a run does not depend on them.
_UNUSED = (
    "data_loader_num_workers", "dataset_name", "dataset_interface", "device", "model_checkpoints_location",
    "multi_gpu_mode", "project_name", "sg_logger",
)  # fmt: skip
_CHECKPOINT_KEYS = (
    "checkpoint_path", "load_backbone", "load_checkpoint", "load_weights_only", "num_workers",
    "pretrained_weights", "strict_load",
)  # fmt: skip
# Of SuperGradients 2 and 3: what each may say, and what to write for the rest.
_OLD_CHECKPOINT_KEYS = {
    "ckpt_name": ("ckpt_latest.pth", "give the file's path as checkpoint_path"),
    "external_checkpoint_path": (None, "write checkpoint_path"),
    "load_ema_as_net": (False, "leave it out: a checkpoint's state_dict is the average where there is one"),
    "source_ckpt_folder_name": (None, "give the file's path as checkpoint_path"),
}
# What older recipes wrote among a network's options, though no network reads it.
_NO_OPTIONS = ("schema", "strict_load", "sync_bn")
_MISSPELT = 0.92
"""A section this like a known one is meant to be that: training_parms, and not my_dataset_params."""
_ONE_PROCESS = (None, False, "off", "none", "cpu")
_DDP = ("ddp", "auto", "distributed_data_parallel", "distributeddataparallel")


def recipe_config(recipe: Mapping[str, Any], launcher: str = "none") -> dict[str, Any]:
    """Return the keyword arguments of a `Runner` for a composed recipe, as plain values.

    Args:
        recipe: what `slipstream.recipes.compose` returns, or any mapping with the same keys.
        launcher: what started the processes, as for `Runner`.

    Raises:
        ConfigError: a key is missing, has a wrong value, or asks for what cannot be had; it names the key.
    """
    from slipstream.training.translate import runner_config

    _check_keys(recipe)
    gpus(recipe)  # refuses wrong words; what wraps the model in several processes is left to the plan
    network = _network(recipe)
    return runner_config(
        experiment_name=_required(recipe, "experiment_name", str),
        ckpt_root_dir=recipe.get("ckpt_root_dir"),
        network=network,
        training_params=_training_params(recipe),
        train_dataloader=_loader(recipe, "train", recipe.get("train_dataloader")),
        val_dataloader=_loader(recipe, "val", recipe.get("val_dataloader")),
        test_dataloader=_test_loader(recipe),
        pretrained=_pretrained(recipe),
        num_classes=network.get("num_classes"),
        launcher=launcher,
    )


def gpus(recipe: Mapping[str, Any]) -> int | None:
    """Return on how many devices a recipe trains: 1 without data parallelism, None for all that there are.

    Raises:
        ConfigError: `multi_gpu` or `num_gpus` has a value that it cannot have.
    """
    mode, count = recipe.get("multi_gpu"), recipe.get("num_gpus")
    word = mode.lower() if isinstance(mode, str) else mode
    if word in _ONE_PROCESS:
        return 1
    if word not in _DDP:
        raise ConfigError(f"must be DDP, AUTO or Off, not {mode!r}", "multi_gpu")
    if count in (None, -1):
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"must be a number of GPUs, or -1 for all, not {count!r}", "num_gpus")
    return count


def pretrained_whole(cfg: Mapping[str, Any]) -> bool:
    """Return whether the network of a run's configuration starts from all weights of a file, not a backbone's."""
    given = cfg.get("model", {}).get("pretrained") or {}
    return bool(given.get("checkpoint_path")) and not given.get("load_backbone")


def _check_keys(recipe: Mapping[str, Any]) -> None:
    for key, value in recipe.items():
        if key in (*_KEYS, *_UNUSED) or not (hint := did_you_mean(str(key), _KEYS)):
            continue
        if isinstance(value, Mapping) and get_close_matches(str(key), _KEYS, cutoff=_MISSPELT):
            raise UnknownNameError(f"there is no such section{hint}", str(key))
        # Recipes keep variables of their own beside the known keys, so that this is no error.
        logging.getLogger("slipstream").warning(
            "the recipe's key '%s' has no meaning of its own%s", key, hint
        )


def _required(recipe: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(value := recipe.get(key), kind):
        what = "is missing" if value is None else f"must be a {kind.__name__}, not {value!r}"
        raise ConfigError(what, key)
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
    kept = {key: value for key, value in options.items() if key not in _NO_OPTIONS}
    return {"type": _required(recipe, "architecture", str), **kept}


def _training_params(recipe: Mapping[str, Any]) -> dict[str, Any]:
    params = {**_section(recipe, "training_hyperparams"), **_section(recipe, "training_params")}
    if not params:
        raise ConfigError("is missing", "training_hyperparams")
    if recipe.get("load_checkpoint") and not params.get("resume"):
        params["resume"] = True
    if "sync_bn" not in params and "sync_bn" in (options := _section(recipe, "arch_params")):
        params["sync_bn"] = options["sync_bn"]
    return params


def _pretrained(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    given = _section(recipe, "checkpoint_params")
    for key, (default, remedy) in _OLD_CHECKPOINT_KEYS.items():
        if given.pop(key, None) not in (None, "", default):
            raise ConfigError(f"is a word of older SuperGradients: {remedy}", f"checkpoint_params.{key}")
    for key in given:
        if key not in _CHECKPOINT_KEYS:
            hint = did_you_mean(str(key), _CHECKPOINT_KEYS)
            raise UnknownNameError(f"there is no such key{hint}", f"checkpoint_params.{key}")
    if given.get("pretrained_weights"):
        raise ConfigError(
            "nothing is downloaded: fetch the file, and give checkpoint_params.checkpoint_path",
            "checkpoint_params.pretrained_weights",
        )
    if not given.get("checkpoint_path"):
        return None
    return {
        "checkpoint_path": given["checkpoint_path"],
        "strict_load": given.get("strict_load", True),
        "load_backbone": given.get("load_backbone") or False,
    }


def _loader(recipe: Mapping[str, Any], split: str, name: str | None) -> dict[str, Any]:
    from slipstream.training import dataloaders

    params = _section(recipe, "dataset_params")
    dataset = _section(params, f"{split}_dataset_params")
    if dataset.get("list_file"):
        dataset.pop("split", None)  # of the group that the recipe builds upon
    try:
        return dataloaders.config(name, dataset, _section(params, f"{split}_dataloader_params"))
    except ConfigError as error:
        error.path = error.path or f"{split}_dataloader"
        raise


def _test_loader(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    given = recipe.get("test_dataloaders")
    if not given:
        return None
    several = given.values() if isinstance(given, Mapping) else given
    names = [given] if isinstance(given, str) else list(several)
    if len(names) != 1:
        raise ConfigError(
            f"one data set is evaluated as the test set, not {len(names)}: {names}", "test_dataloaders"
        )
    return _loader(recipe, "test", names[0])
