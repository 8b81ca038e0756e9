"""From the name of a recipe in SuperGradients' words to plain values, by Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slipstream.config.override import check_override
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.recipes.find import FOLDER, find_recipe, read_yaml
from slipstream.recipes.resolvers import register_resolvers

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["compose", "hydra_words", "load", "search_folders", "words_for_hydra"]

# What a shortcut stands for, in every recipe, whether it includes `variable_setup` or not.
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
# What users of other tools write for a shortcut.
_SYNONYMS = {"learning_rate": "lr", "initial_lr": "lr", "max_epochs": "epochs", "num_epochs": "epochs",
             "workers": "num_workers"}  # fmt: skip
# Every recipe knows these, though not every one writes them down.
_TOP = (*_SHORTCUTS, "experiment_name", "ckpt_root_dir", "data_root_dir", "multi_gpu", "num_gpus",
        "load_checkpoint", "test_dataloaders")  # fmt: skip
# Whoever reads these refuses a key that it does not know, so that a new one needs no `+`.
_OPEN = (
    r"training_hyperparams|arch_params|checkpoint_params"
    r"|dataset_params\.(train|val|test)_(dataset|dataloader)_params"
)
_GIVEN = re.compile(rf"(?=({'|'.join(_TOP)})=|({_OPEN})\.)")
_PREDECESSOR = "super_gradients"


def compose(name: str, overrides: Iterable[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
    """Return what a recipe says, as plain values: nothing of it is built, and no module that it names is imported.

    Its defaults list is followed, the overrides lie over it, interpolations are filled in. `training_params`, in the
    file or in an override, means `training_hyperparams`; the shortcuts lr, batch_size, val_batch_size, ema, epochs,
    resume and num_workers are carried out. Hydra's own state is left as it was found, so that a call can stand in a
    running Hydra job.

    Args:
        name: a recipe's name, or the path of a YAML file.
        overrides: Hydra's: `key=value`, `group=option`, `+key=value`, `~key`.
        config_dir: a folder of the user's own recipes and groups, which come before those of the package.

    Raises:
        UnknownNameError: a recipe, group option or key that there is not; it names the nearest.
        ConfigError: a file or an override cannot be read, or an interpolation leads nowhere.
    """
    with extra("recipes"):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

    words = hydra_words(overrides)
    path = find_recipe(name, config_dir)
    read_yaml(path)  # what is wrong with the file itself is said with its line
    with _hydra(path.parent):
        cfg = load(path, words, config_dir)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        _merge_spellings(cfg, words)
        try:
            plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{_first_line(error)} (in {path})", str(error.full_key or "")) from None
    values: dict[str, Any] = _without_targets(plain)
    _carry_out_shortcuts(values)
    return values


def hydra_words(overrides: Iterable[str]) -> list[str]:
    """Return overrides as Hydra takes them: one spelling of `training_params`, and new keys where they may be."""
    words = [
        re.sub(r"^([+~]*)training_params(?=[.=])", r"\1training_hyperparams", word) for word in overrides
    ]
    return [_GIVEN.sub("++", word, count=1) if _GIVEN.match(word) else word for word in words]


def search_folders(path: Path, config_dir: str | Path | None) -> list[Path]:
    """Return where the groups of a recipe are looked for: beside it, in the user's folder, in the package."""
    folders = [path.parent, *([Path(config_dir)] if config_dir else []), FOLDER]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def load(path: Path, words: Sequence[str], config_dir: str | Path | None = None) -> DictConfig:
    """Return the composed recipe with Hydra's own settings, its interpolations as they are written.

    Raises:
        ConfigError: see `compose`.
    """
    import hydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    kept = [word for word in words if not word.startswith("hydra.searchpath=")]
    searchpath = _searchpath(path, words, config_dir)
    try:
        return hydra.compose(path.stem, [*kept, *searchpath], return_hydra_config=True)
    except MissingConfigException as error:
        raise _missing(error, path, search_folders(path, config_dir)) from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        _say_unknown_key(error, path, words, config_dir)
        raise ConfigError(f"{_first_line(error)} (in {path})") from None
    except TypeError:  # all that Hydra says of an override that goes into a list
        raise ConfigError(
            f"an override replaces a list as a whole, not an item of it: {words} (in {path})"
        ) from None


def _searchpath(path: Path, words: Sequence[str], config_dir: str | Path | None) -> list[str]:
    """Return the override that adds our folders to those of the recipe, and leaves out its predecessor's package."""
    given = next((word.partition("=")[2] for word in words if word.startswith("hydra.searchpath=")), "")
    own = yaml.safe_load(given) if given else (read_yaml(path).get("hydra") or {}).get("searchpath")
    kept = [str(entry) for entry in own or () if not str(entry).startswith(f"pkg://{_PREDECESSOR}")]
    folders = [f"file://{folder}" for folder in search_folders(path, config_dir)[1:]]
    quoted = ["'" + entry.replace("'", r"\'") + "'" for entry in [*kept, *folders]]
    return [f"hydra.searchpath=[{','.join(quoted)}]"]


def words_for_hydra(path: Path, overrides: Iterable[str], config_dir: str | Path | None = None) -> list[str]:
    """Return the overrides with which `hydra.main` itself reads a recipe, and leaves no folders of its own behind.

    A shortcut is followed by the words that it stands for, so that `--cfg job` shows its effect.

    Raises:
        ConfigError: the recipe cannot be composed; see `compose`.
    """
    words = hydra_words(overrides)
    with _hydra(path.parent):
        callbacks = load(path, [], config_dir).hydra.callbacks
        gone = [name for name in callbacks if _PREDECESSOR in str(callbacks[name].get("_target_", ""))]
    root, name = "${oc.select:ckpt_root_dir,null}", f"${{oc.select:experiment_name,{path.stem}}}"
    settings = {
        "hydra.output_subdir": "null",
        "hydra/job_logging": "none",
        "hydra.run.dir": ".",
        "hydra.sweep.dir": f"'${{hydra_output_dir:{root},{name}}}/${{now:%Y-%m-%d_%H-%M-%S}}'",
        "hydra.sweep.subdir": ".",
    }
    given = {word.partition("=")[0] for word in words}
    return [
        *(word for word in words if not word.startswith("hydra.searchpath=")),
        *_meanings(words),
        *_searchpath(path, words, config_dir),
        *(f"~hydra.callbacks.{name}" for name in gone),
        *(f"{key}={value}" for key, value in settings.items() if key not in given),
    ]


def _meanings(words: Iterable[str]) -> Iterator[str]:
    """Yield the words that shortcuts stand for; not of several values, which Hydra would combine with themselves."""
    with extra("recipes"):
        from hydra.core.override_parser.overrides_parser import OverridesParser

    for override in OverridesParser.create().parse_overrides(list(words)):
        places = _SHORTCUTS.get(override.key_or_group, ())
        if places and not override.is_sweep_override() and override.value() is not None:
            yield from (f"++{place}={override.get_value_element_as_str()}" for place in places)


@contextmanager
def _hydra(folder: Path) -> Iterator[None]:
    """Let Hydra read `folder`; what it keeps for a process is afterwards as it was before."""
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


def _merge_spellings(cfg: DictConfig, words: Sequence[str]) -> None:
    """Lay a recipe's `training_params` over its `training_hyperparams`, and the overrides over both."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    if (given := cfg.pop("training_params", None)) is None:
        return
    cfg.training_hyperparams = OmegaConf.merge(cfg.get("training_hyperparams") or {}, given)
    for override in OverridesParser.create().parse_overrides(list(words)):
        if override.key_or_group.startswith("training_hyperparams.") and not override.is_delete():
            OmegaConf.update(cfg, override.key_or_group, override.value())


def _without_targets(value: Any) -> Any:
    """Return values without what Hydra's `instantiate` would read, where they mean a plain value."""
    if isinstance(value, list):
        return [_without_targets(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = str(value.get("_target_", "")).rpartition(".")[2]
    if name == "empty_list":
        return []
    if name == "StrictLoad":
        return value.get("value", True)
    if name == "MultiGPUMode":
        return value.get("value")
    return {key: _without_targets(item) for key, item in value.items() if key != "_convert_"}


def _carry_out_shortcuts(values: dict[str, Any]) -> None:
    for shortcut, places in _SHORTCUTS.items():
        value = values.pop(shortcut, None)
        for place in places if value is not None else ():
            *parents, key = place.split(".")
            node = values
            for parent in parents:
                node[parent] = node = node.get(parent) or {}
            node[key] = value


# ---- what went wrong, in one line ---------------------------------------------------------------------------------


def _first_line(error: BaseException) -> str:
    """Return what an error of Hydra, OmegaConf or PyYAML says; their other lines are hints for programmers."""
    from hydra.errors import OverrideParseException

    lines = str(error if str(error) else error.__cause__).strip().splitlines()
    if isinstance(error, OverrideParseException):
        return f"'{error.override}' is no override, key=value or group=option: {' '.join(lines[:-1])}"
    if found := re.match("Ambiguous value for argument '([^=]+)=(.*)'", lines[0]):
        key, value = found[1].lstrip("+"), found[2]
        return f"{key}={value} has several values: [{value}] is a list; --multirun of train_from_recipe tries each"
    return " ".join(line.strip() for line in lines) if isinstance(error, yaml.YAMLError) else lines[0]


def _missing(error: Any, path: Path, folders: Sequence[Path]) -> ConfigError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = error.options or ()
    there = f"there are: {', '.join(options)}" if options else "no recipes of that kind are known here"
    looked = ", ".join(str(folder) for folder in folders)
    what = f"{group} '{option}'" if group else f"recipe '{option}'"
    return UnknownNameError(
        f"there is no {what}{did_you_mean(option, options)} ({there}; looked for in {looked})", str(path)
    )


def _say_unknown_key(
    error: Exception, path: Path, words: Sequence[str], config_dir: str | Path | None
) -> None:
    """Raise an error that names the nearest key, if it is an override of a key that there is not that failed."""
    from omegaconf import OmegaConf

    if (found := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))) is None:
        return
    key = found[1]
    if key in _SYNONYMS:
        raise UnknownNameError(f"there is no such key; did you mean '{_SYNONYMS[key]}'? (in {path})", key)
    others = [word for word in words if re.split("[=@]", word.lstrip("+~"))[0] != key]
    tree: Any = OmegaConf.to_container(load(path, others, config_dir), resolve=False)
    check_override({k: v for k, v in tree.items() if k != "hydra"}, key.partition("@")[0], _TOP, str(path))
    if re.match("Could not override", str(error)) and "@" not in key:
        raise ConfigError(f"new keys are written with a +: +{key}=... (in {path})", key)
