"""Which recipes there are, where their files lie, and in whose words they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean

__all__ = ["FOLDER", "find_recipe", "is_composed", "read_yaml", "recipes"]

FOLDER = Path(__file__).parent
# What other recipes include to have their shortcuts; no recipe itself.
_INCLUDED = "variable_setup"
_WORDS = ("defaults", "architecture", "arch_params", "training_hyperparams", "training_params")


def recipes(config_dir: str | Path | None = None) -> Mapping[str, str]:
    """Return what each recipe does, the comment in its first line, by its name; those of `config_dir` first."""
    found: dict[str, str] = {}
    for folder in (*([Path(config_dir)] if config_dir else []), FOLDER):
        for path in sorted(folder.glob("[a-z]*.yaml")):
            if path.stem != _INCLUDED and path.stem not in found:
                with path.open(encoding="utf-8") as file:
                    first = file.readline()
                found[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def find_recipe(name: str, config_dir: str | Path | None = None) -> Path:
    """Return the file of a recipe, given by its name or as a configuration file of the user's.

    Args:
        name: a recipe's name, or a path with its ending.
        config_dir: a folder of the user's own recipes, which comes before those of the package.

    Raises:
        UnknownNameError: there is neither.
        ConfigError: `config_dir` is no folder.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"there is no folder {config_dir}", "--config-dir")
    for folder in (*([Path(config_dir)] if config_dir else []), FOLDER):
        for ending in (".yaml", ""):
            own = folder / f"{name}{ending}"
            if "/" not in name and own.suffix == ".yaml" and own.is_file():
                return own
    if Path(name).suffix in (".py", ".yaml", ".yml", ".json", ".toml"):
        return Path(name)  # Config.fromfile says what is wrong with it
    raise UnknownNameError(
        f"there is no recipe '{name}'{did_you_mean(name, recipes(config_dir))} "
        "('slipstream recipes' lists them; a configuration file is given with its ending)"
    )


def is_composed(path: Path) -> bool:
    """Say whether a recipe is written in SuperGradients' words, and composed by Hydra.

    Raises:
        ConfigError: the file cannot be read, or not by Hydra.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    values = read_yaml(path)
    if "_base_" in values or not any(word in values for word in _WORDS):
        return False
    if path.suffix != ".yaml":
        raise ConfigError("Hydra reads files that end in .yaml: rename it", str(path))
    return True


def read_yaml(path: Path) -> dict[str, Any]:
    """Return what one file says, nothing filled in; an empty dict if it is no mapping.

    Raises:
        ConfigError: naming file and line.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    return values if isinstance(values, dict) else {}
