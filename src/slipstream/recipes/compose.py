"""Use Hydra to compose a recipe in SuperGradients syntax into built-in Python values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slipstream.config.override import check_override
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.recipes.data_root import set_data_root
from slipstream.recipes.find import FOLDER, find_recipe, read_yaml, recipes_extending
from slipstream.recipes.interpolations import check_interpolations
from slipstream.recipes.resolvers import register_resolvers
from slipstream.recipes.shortcuts import SYNONYMS
from slipstream.recipes.targets import replace_targets
from slipstream.recipes.untrusted import check_files, check_hydra, check_search_path
from slipstream.training.tasks import check_task

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["compose", "hydra_overrides", "load", "normalize_overrides", "search_folders"]

# The keys that each shortcut sets in every recipe, whether or not the recipe includes `variable_setup`.
_SHORTCUTS = {
    "lr": ["training_hyperparams.initial_lr"],
    "batch_size": ["dataset_params.train_dataloader_params.batch_size"],
    "val_batch_size": ["dataset_params.val_dataloader_params.batch_size"],
    "ema": ["training_hyperparams.ema"],
    "epochs": ["training_hyperparams.max_epochs"],
    "resume": ["training_hyperparams.resume"],
    "num_workers": [
        "dataset_params.train_dataloader_params.num_workers",
        "dataset_params.val_dataloader_params.num_workers",
    ],
}
# Keys that overrides can set without a +, even if the recipe does not contain them.
_TOP_LEVEL_KEYS = (*_SHORTCUTS, "experiment_name", "ckpt_root_dir", "data_root_dir", "multi_gpu", "num_gpus",
        "load_checkpoint", "test_dataloaders")  # fmt: skip
# Unknown keys in these sections are rejected later, so new keys do not require a +.
_OPEN_SECTIONS = (
    r"training_hyperparams|arch_params|checkpoint_params"
    r"|dataset_params\.(train|val|test)_(dataset|dataloader)_params"
)
_NEW_KEYS = re.compile(rf"(?=({'|'.join(_TOP_LEVEL_KEYS)})=|({_OPEN_SECTIONS})\.)")
_SUPERGRADIENTS = "super_gradients"


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
        ConfigError: if a file or an override is invalid, an interpolation cannot be resolved, the recipe's task is
            not supported, or the recipe is only a base for other recipes.
    """
    with extra("recipes"):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

    normalized = normalize_overrides(overrides)
    path = find_recipe(name, config_dir)
    check_files(path, normalized, search_folders(path, config_dir))  # reports syntax errors with line numbers
    with _hydra(path.parent):
        cfg = load(path, normalized, config_dir, trust)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        _merge_synonyms(cfg, normalized)
        raw: Any = OmegaConf.to_container(cfg, resolve=False)
        check_task(raw)
        _check_base(raw, path, config_dir)
        check_interpolations(raw, str(path))
        try:
            plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{_first_line(error)} (in {path})", str(error.full_key or "")) from None
        except RecursionError:
            raise ConfigError(
                f"{path}: the values contain a cycle or are nested too deeply; remove the cycle, or use fewer levels"
            ) from None
    values: dict[str, Any] = replace_targets(plain)
    set_data_root(values, raw, normalized)
    _expand_shortcuts(values)
    return values


def normalize_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides, with `training_params` renamed, and with a ++ prefix for keys that may be new."""
    renamed = [
        re.sub(r"^([+~]*)training_params(?=[.=])", r"\1training_hyperparams", override)
        for override in overrides
    ]
    return [
        _NEW_KEYS.sub("++", override, count=1) if _NEW_KEYS.match(override) else override
        for override in renamed
    ]


def search_folders(path: Path, config_dir: str | Path | None) -> list[Path]:
    """Return the search path for config groups: the recipe's folder, the user's folder and the built-in folder."""
    folders = [path.parent, *([Path(config_dir)] if config_dir else []), FOLDER]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def load(
    path: Path, overrides: Sequence[str], config_dir: str | Path | None = None, trust: bool = False
) -> DictConfig:
    """Return the composed recipe with Hydra's settings and unresolved interpolations.

    Raises:
        ConfigError: see `compose`.
    """
    import hydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    kept = [override for override in overrides if not override.startswith("hydra.searchpath=")]
    searchpath = _searchpath(path, overrides, config_dir, trust)
    try:
        return hydra.compose(path.stem, [*kept, *searchpath], return_hydra_config=True)
    except MissingConfigException as error:
        raise _missing(error, path, search_folders(path, config_dir)) from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        _raise_unknown_key(error, path, overrides, config_dir)
        raise ConfigError(f"{_first_line(error)} (in {path})") from None
    except TypeError:  # Hydra raises this error, without a message, if an override sets a list item
        raise ConfigError(
            f"overrides can only replace a whole list, not one of its items: {overrides} (in {path})"
        ) from None


def _searchpath(
    path: Path, overrides: Sequence[str], config_dir: str | Path | None, trust: bool
) -> list[str]:
    """Return an override that adds `search_folders` to the search path and removes the SuperGradients package."""
    value = next(
        (override.partition("=")[2] for override in overrides if override.startswith("hydra.searchpath=")), ""
    )
    own = yaml.safe_load(value) if value else (read_yaml(path).get("hydra") or {}).get("searchpath")
    kept = [str(entry) for entry in own or () if not str(entry).startswith(f"pkg://{_SUPERGRADIENTS}")]
    # A search path in the overrides is trusted; one in the recipe file is checked, unless `trust` is set.
    if not (value or trust):
        check_search_path(kept, path)
    folders = [f"file://{folder}" for folder in search_folders(path, config_dir)[1:]]
    quoted = ["'" + entry.replace("'", r"\'") + "'" for entry in [*kept, *folders]]
    return [f"hydra.searchpath=[{','.join(quoted)}]"]


def hydra_overrides(
    path: Path, overrides: Iterable[str], config_dir: str | Path | None = None, trust: bool = False
) -> list[str]:
    """Return overrides with which `hydra.main` composes a recipe and creates an output folder only for sweeps.

    The overrides that shortcuts expand to are added, so that `--cfg job` shows their effect.

    Raises:
        ConfigError: if the recipe cannot be composed; see `compose`.
    """
    from omegaconf import OmegaConf

    normalized = normalize_overrides(overrides)
    check_files(path, normalized, search_folders(path, config_dir))
    with _hydra(path.parent):
        cfg = load(path, [], config_dir, trust)
        raw: Any = OmegaConf.to_container(cfg, resolve=False)
        check_interpolations(raw, str(path))
        if not trust:
            check_hydra(raw["hydra"], path)
        callbacks = cfg.hydra.callbacks
        removed = [name for name in callbacks if _SUPERGRADIENTS in str(callbacks[name].get("_target_", ""))]
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
        *_shortcut_targets(normalized),
        *_searchpath(path, normalized, config_dir, trust),
        *(f"~hydra.callbacks.{name}" for name in removed),
        *(f"{key}={value}" for key, value in fixed.items() if key not in overridden),
    ]


def _shortcut_targets(overrides: Iterable[str]) -> Iterator[str]:
    """Yield the overrides that shortcuts expand to.

    Sweeps are omitted, because Hydra would run the Cartesian product of a sweep and its copies.
    """
    with extra("recipes"):
        from hydra.core.override_parser.overrides_parser import OverridesParser

    for override in OverridesParser.create().parse_overrides(list(overrides)):
        keys = _SHORTCUTS.get(override.key_or_group, ())
        if keys and not override.is_sweep_override() and override.value() is not None:
            yield from (f"++{key}={override.get_value_element_as_str()}" for key in keys)


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


def _check_base(raw: Mapping[str, Any], path: Path, config_dir: str | Path | None) -> None:
    """Raise a ConfigError if the recipe has no architecture because it is only a base for other recipes."""
    if raw.get("architecture") is None and (
        names := recipes_extending(path.stem, search_folders(path, config_dir))
    ):
        raise ConfigError(
            f"is missing, because {path.stem} is only a base for other recipes; train one of them "
            f"({', '.join(names)}), or set architecture=NAME",
            "architecture",
        )


def _expand_shortcuts(values: dict[str, Any]) -> None:
    for shortcut, keys in _SHORTCUTS.items():
        value = values.pop(shortcut, None)
        for key in keys if value is not None else ():
            *parents, last = key.split(".")
            node = values
            for parent in parents:
                node[parent] = node = node.get(parent) or {}
            node[last] = value


# ---- one-line error messages --------------------------------------------------------------------------------------


def _first_line(error: BaseException) -> str:
    """Return the message of a Hydra, OmegaConf or PyYAML error without its hints for developers."""
    from hydra.errors import OverrideParseException

    lines = str(error if str(error) else error.__cause__).strip().splitlines()
    if isinstance(error, OverrideParseException):
        return (
            f"'{error.override}' is not a valid override (key=value or group=option): {' '.join(lines[:-1])}"
        )
    if found := re.match("Ambiguous value for argument '([^=]+)=(.*)'", lines[0]):
        key, value = found[1].lstrip("+"), found[2]
        return (
            f"{key}={value} has several values; use [{value}] for a list, or train_from_recipe with --multirun for one "
            "run per value"
        )
    return " ".join(line.strip() for line in lines) if isinstance(error, yaml.YAMLError) else lines[0]


def _missing(error: Any, path: Path, folders: Sequence[Path]) -> ConfigError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = error.options or ()
    available = f"available: {', '.join(options)}" if options else "available: none"
    searched = ", ".join(str(folder) for folder in folders)
    subject = f"{group} '{option}'" if group else f"recipe '{option}'"
    return UnknownNameError(
        f"{subject} not found{did_you_mean(option, options)} ({available}; searched in {searched})", str(path)
    )


def _raise_unknown_key(
    error: Exception, path: Path, overrides: Sequence[str], config_dir: str | Path | None
) -> None:
    """Raise an error that suggests the nearest key if an override with an unknown key caused `error`."""
    from omegaconf import OmegaConf

    if (found := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))) is None:
        return
    key = found[1]
    if key in SYNONYMS:
        raise UnknownNameError(f"unknown key; did you mean '{SYNONYMS[key]}'? (in {path})", key)
    others = [override for override in overrides if re.split("[=@]", override.lstrip("+~"))[0] != key]
    tree: Any = OmegaConf.to_container(load(path, others, config_dir), resolve=False)
    check_override(
        {k: v for k, v in tree.items() if k != "hydra"}, key.partition("@")[0], _TOP_LEVEL_KEYS, str(path)
    )
    if re.match("Could not override", str(error)) and "@" not in key:
        raise ConfigError(f"new keys require a +; use +{key}=... (in {path})", key)
