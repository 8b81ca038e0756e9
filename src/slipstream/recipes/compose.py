"""Use Hydra to compose a recipe in SuperGradients syntax into built-in Python values."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.files import check_name
from slipstream.recipes.find import FOLDER, find_recipe, is_composed, read_yaml
from slipstream.recipes.shortcuts import SYNONYMS

if TYPE_CHECKING:
    from omegaconf import DictConfig

_LOADER = "dataset_params.{}_dataloader_params.{}"
# The keys that each shortcut sets in every recipe, whether or not the recipe includes `variable_setup`.
_SHORTCUTS = {
    "lr": ["training_hyperparams.initial_lr"],
    "batch_size": [_LOADER.format("train", "batch_size")],
    "val_batch_size": [_LOADER.format("val", "batch_size")],
    "ema": ["training_hyperparams.ema"],
    "epochs": ["training_hyperparams.max_epochs"],
    "resume": ["training_hyperparams.resume"],
    "num_workers": [_LOADER.format(split, "num_workers") for split in ("train", "val")],
}
# Keys that overrides can set without a +, even if the recipe does not contain them.
_TOP_LEVEL_KEYS = (*_SHORTCUTS, "experiment_name", "ckpt_root_dir", "data_root_dir", "multi_gpu", "num_gpus",
        "load_checkpoint", "test_dataloaders")  # fmt: skip
# Unknown keys in these sections are rejected later, so new keys do not require a +.
_OPEN_SECTIONS = r"training_hyperparams|arch_params|checkpoint_params|dataset_params\.\w+_params"
_NEW_KEYS = re.compile(rf"(?=({'|'.join(_TOP_LEVEL_KEYS)})=|({_OPEN_SECTIONS})\.)")
_UNTRUSTED = "{} is not trusted to execute code, but contains {!r}; to trust it, use --trust or trust=True"
_TRUSTED_PACKAGES = re.compile(r"pkg://(slipstream|hydra|super_gradients)(\.|$)|file://|(?!.*://)")
_TRUSTED_TARGETS = ("hydra.", "hydra_plugins.", "super_gradients.", "logging.", "colorlog.")
# Functions that recipes use to compute `lr_updates`.
_RANGES: Mapping[str, Callable[..., Any]] = {"numpy.arange": np.arange, "numpy.linspace": np.linspace}


def compose(
    name: str, overrides: Iterable[str] = (), config_dir: str | Path | None = None, trust: bool = False
) -> dict[str, Any]:
    """Return a recipe as built-in Python values, without building objects or importing the recipe's modules.

    The defaults list is processed, overrides are applied and interpolations are resolved. In the file and in overrides,
    `training_params` is a synonym for `training_hyperparams`. The shortcuts lr, batch_size, val_batch_size, ema,
    epochs, resume and num_workers are expanded. Hydra's global state is restored, so this function also works inside a
    Hydra job.

    Args:
        name: name of a recipe, or path of a YAML file.
        overrides: Hydra overrides: `key=value`, `group=option`, `+key=value`, `~key`.
        config_dir: folder with your own recipes and groups, which take precedence over built-in recipes and groups.
        trust: whether the recipe's `hydra.searchpath` may contain arbitrary packages (`pkg://`), which Hydra imports.

    Raises:
        UnknownNameError: if a recipe, group option or key does not exist. The message suggests the nearest name.
        ConfigError: if a file or an override is invalid, or an interpolation cannot be resolved.
    """
    with extra("recipes"):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

    normalized = _normalize(overrides)
    path = find_recipe(name, config_dir)
    with _hydra(path.parent):
        cfg = _load(path, normalized, config_dir, trust)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        _merge_synonyms(cfg, normalized)
        raw: Any = OmegaConf.to_container(cfg, resolve=False)
        try:
            plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{_first_line(error)} (in {path})", str(error.full_key or "")) from None
    values: dict[str, Any] = _replace_targets(plain)
    _set_data_root(values, raw, normalized)
    for shortcut, keys in _SHORTCUTS.items():
        value = values.pop(shortcut, None)
        for key in keys if value is not None else ():
            *parents, last = key.split(".")
            node = values
            for parent in parents:
                node[parent] = node = node.get(parent) or {}
            node[last] = value
    return values


def _normalize(overrides: Iterable[str]) -> list[str]:
    """Return the overrides, with `training_params` renamed, and with a ++ prefix for keys that may be new."""
    old = re.compile(r"^([+~]*)training_params(?=[.=])")
    renamed = [old.sub(r"\1training_hyperparams", override) for override in overrides]
    return [f"++{override}" if _NEW_KEYS.match(override) else override for override in renamed]


def _search_folders(path: Path, config_dir: str | Path | None) -> list[Path]:
    """Return the search path for config groups: the recipe's folder, the user's folder and the built-in folder."""
    folders = [path.parent, *([Path(config_dir)] if config_dir else []), FOLDER]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def _load(path: Path, overrides: Sequence[str], config_dir: str | Path | None, trust: bool) -> DictConfig:
    """Return the composed recipe with Hydra's settings and unresolved interpolations."""
    import hydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    kept = [override for override in overrides if not override.startswith("hydra.searchpath=")]
    searchpath = _searchpath(path, overrides, config_dir, trust)
    try:
        return hydra.compose(path.stem, [*kept, searchpath], return_hydra_config=True)
    except MissingConfigException as error:
        missing, options = str(error.missing_cfg_file), error.options or ()
        hint = did_you_mean(missing.rpartition("/")[2], options)
        raise UnknownNameError(f"{missing} not found{hint} (available: {options})", str(path)) from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        read_yaml(path)  # raises an error with the line number if the file is not valid YAML
        message = _first_line(error)
        if found := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", message):
            key = found[1]
            hint = did_you_mean(SYNONYMS.get(key, key), _TOP_LEVEL_KEYS)
            raise UnknownNameError(f"unknown key{hint or f'; a new key requires +{key}=...'}", key) from None
        raise ConfigError(f"{message} (in {path})") from None


def _searchpath(path: Path, overrides: Sequence[str], config_dir: str | Path | None, trust: bool) -> str:
    """Return an override that adds `_search_folders` to the search path and removes the SuperGradients package."""
    given = [override.partition("=")[2] for override in overrides if override.startswith("hydra.searchpath=")]
    own = yaml.safe_load(given[0]) if given else (read_yaml(path).get("hydra") or {}).get("searchpath")
    kept = [str(entry) for entry in own or () if not str(entry).startswith("pkg://super_gradients")]
    # A search path in the overrides is trusted; one in the recipe file is checked, unless `trust` is set.
    for entry in [] if given or trust else kept:
        if not _TRUSTED_PACKAGES.match(entry):
            raise ConfigError(_UNTRUSTED.format(path, entry), "hydra.searchpath")
    entries = [*kept, *(f"file://{folder}" for folder in _search_folders(path, config_dir)[1:])]
    quoted = ["'" + entry.replace("'", r"\'") + "'" for entry in entries]
    return f"hydra.searchpath=[{','.join(quoted)}]"


def hydra_overrides(
    path: Path, overrides: Iterable[str], config_dir: str | Path | None = None, trust: bool = False
) -> list[str]:
    """Return overrides with which `hydra.main` composes a recipe and creates an output folder only for sweeps.

    Raises:
        ConfigError: if the recipe cannot be composed; see `compose`.
    """
    from omegaconf import OmegaConf

    normalized = _normalize(overrides)
    if not is_composed(path):  # Hydra does not read `_base_`, so all keys may be new; the job checks them
        normalized = [
            f"++{word}" if word[0] not in "+~" and "hydra" not in word else word for word in normalized
        ]
    with _hydra(path.parent):
        cfg = _load(path, [], config_dir, trust)
        settings: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    if not trust:
        _check_hydra(settings, "hydra", path)
    targets = {name: str(callback.get("_target_", "")) for name, callback in settings["callbacks"].items()}
    root, name = "${oc.select:ckpt_root_dir,null}", f"${{oc.select:experiment_name,{path.stem}}}"
    fixed = {
        "hydra.output_subdir": "null",
        "hydra/job_logging": "none",
        "hydra.run.dir": ".",
        "hydra.sweep.dir": f"'${{hydra_output_dir:{root},{name}}}/${{now:%Y-%m-%d_%H-%M-%S}}'",
        "hydra.sweep.subdir": ".",
    }
    overridden = {override.partition("=")[0] for override in normalized}
    return [
        *(override for override in normalized if not override.startswith("hydra.searchpath=")),
        _searchpath(path, normalized, config_dir, trust),
        *(f"~hydra.callbacks.{key}" for key, target in targets.items() if "super_gradients" in target),
        *(f"{key}={value}" for key, value in fixed.items() if key not in overridden),
    ]


def _check_hydra(settings: Any, key: str, path: Path) -> None:
    """Raise a ConfigError if Hydra's settings make it import or call code, or set environment variables."""
    items = settings.items() if isinstance(settings, dict) else enumerate(settings)
    for name, value in items:
        if isinstance(value, dict | list):
            _check_hydra(value, f"{key}.{name}", path)
            continue
        is_target = name in ("_target_", "()", "class", "factory")
        called = is_target and not str(value).startswith(_TRUSTED_TARGETS)
        imported = re.search(r"ext://(?!sys\.std(?:out|err)$)", str(value))
        if value is not None and (called or imported or key.endswith("job.env_set")):
            raise ConfigError(_UNTRUSTED.format(path, value), f"{key}.{name}")


@contextmanager
def _hydra(folder: Path) -> Iterator[None]:
    """Initialize Hydra with the configuration folder `folder`, and restore Hydra's global state afterwards."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton

    before = Singleton.get_state()
    try:
        GlobalHydra.instance().clear()
        register_resolvers()
        with initialize_config_dir(str(folder.resolve()), job_name="slipstream", version_base="1.3"):
            yield
    finally:
        Singleton.set_state(before)


def register_resolvers() -> None:
    """Register the functions that SuperGradients' recipes call in `${...}`. Repeated calls have no effect."""
    from omegaconf import OmegaConf

    def output_dir(root: str | None, name: str) -> str:
        return str(Path(root or "work_dirs") / check_name(name, "experiment_name", "ckpt_root_dir"))

    functions: dict[str, Callable[..., Any]] = {
        "hydra_output_dir": output_dir,
        "add": lambda *numbers: sum(numbers),
        "cond": lambda condition, yes, no: yes if condition else no,
        "getitem": lambda container, key: container[key],
        "first": lambda items: items[0],
        "last": lambda items: items[-1],
        "class": lambda path: path,  # the import path remains a string, which the registry looks up later
    }
    for name, function in functions.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _merge_synonyms(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Merge a recipe's `training_params` over its `training_hyperparams`, and the overrides over both."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    if (params := cfg.pop("training_params", None)) is None:
        return
    cfg.training_hyperparams = OmegaConf.merge(cfg.get("training_hyperparams") or {}, params)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group.startswith("training_hyperparams.") and not override.is_delete():
            OmegaConf.update(cfg, override.key_or_group, override.value())


def _replace_targets(value: Any) -> Any:
    """Return `value` with `_target_` dicts for lists, ranges, enums and COCO classes replaced by built-in values.

    Other `_target_` dicts configure components, and are not changed.
    """
    if isinstance(value, list):
        return [_replace_targets(item) for item in value]
    if not isinstance(value, dict):
        return value
    target = str(value.get("_target_", ""))
    name = target.rpartition(".")[2]
    if target in _RANGES:
        keywords = {key: item for key, item in value.items() if not key.startswith("_") and item is not None}
        return _RANGES[target](*(value.get("_args_") or ()), **keywords).tolist()
    if name in ("empty_list", "coco_sub_classes_inclusion_tuples_list"):
        return [] if name == "empty_list" else "voc"
    if name in ("StrictLoad", "MultiGPUMode"):
        return value.get("value", True)
    return {key: _replace_targets(item) for key, item in value.items() if key != "_convert_"}


def _set_data_root(values: Mapping[str, Any], raw: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Replace hard-coded dataset folders in `values` if `data_root_dir` is among the overrides.

    The common parent of all hard-coded folders is replaced, so the subfolders of training and validation images are
    kept. For example, `data_root_dir=DIR` changes /data/imagenet/train and /data/imagenet/val to DIR/train and DIR/val.
    Folders that the recipe derives from `data_root_dir`, or that another override sets, are not replaced. A warning is
    logged if the recipe sets no dataset folder.
    """
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    if "data_root_dir" not in keys or not (folder := values.get("data_root_dir")):
        return
    derived, hard_coded = False, []
    for section in ("train_dataset_params", "val_dataset_params", "test_dataset_params"):
        params, written = (_section(_section(tree, "dataset_params"), section) for tree in (values, raw))
        for key in ("root_dir", "root", "data_root", "data_dir"):
            if "data_root_dir" in str(written.get(key)) or f"dataset_params.{section}.{key}" in keys:
                derived = True
            elif isinstance(params.get(key), str):
                hard_coded.append((params, key))
    if hard_coded:
        common = os.path.commonpath([str(PurePosixPath(params[key])) for params, key in hard_coded])
        for params, key in hard_coded:
            params[key] = str(PurePosixPath(folder) / PurePosixPath(params[key]).relative_to(common))
    elif not derived:
        logging.getLogger("slipstream").warning("data_root_dir has no effect: no dataset folder is set")


def _section(values: Mapping[str, Any], key: str) -> Any:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _first_line(error: BaseException) -> str:
    """Return the message of a Hydra, OmegaConf or PyYAML error without its hints for developers."""
    return str(error if str(error) else error.__cause__).strip().splitlines()[0]
