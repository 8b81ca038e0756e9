"""Find recipes and read their files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from slipstream.config.yaml_format import Loader
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean

FOLDER = Path(__file__).parent
# A recipe in SuperGradients syntax has at least one of these keys.
COMPOSED_KEYS = ("defaults", "architecture", "arch_params", "training_hyperparams", "training_params")


def _folders(config_dir: str | Path | None) -> list[Path]:
    return [*([Path(config_dir)] if config_dir else []), FOLDER]


def recipes(config_dir: str | Path | None = None) -> Mapping[str, str]:
    """Return a dict that maps recipe names to descriptions, with the recipes in `config_dir` first.

    The description is the comment on the first line of the file.
    """
    found: dict[str, str] = {}
    for path in (path for folder in _folders(config_dir) for path in sorted(folder.glob("[a-z]*.yaml"))):
        if path.stem != "variable_setup" and path.stem not in found:  # which only contains shortcuts
            with path.open(encoding="utf-8") as file:
                first = file.readline()
            found[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def find_recipe(name: str, config_dir: str | Path | None = None) -> Path:
    """Return the path of a recipe, given its name, or of a configuration file, given its path.

    Args:
        name: name of a recipe, or path of a configuration file, including its extension.
        config_dir: folder with your own recipes, which take precedence over built-in recipes.

    Raises:
        UnknownNameError: if `name` is neither a recipe nor a path of a configuration file.
        ConfigError: if `config_dir` is not a folder.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"folder not found: {config_dir}", "--config-dir")
    for folder in _folders(config_dir):
        path = folder / f"{name.removesuffix('.yaml')}.yaml"
        with suppress(OSError):  # the name is too long for a file
            if "/" not in name and path.is_file():
                return path
    if Path(name).suffix in (".py", ".yaml", ".yml", ".json", ".toml"):
        return Path(name)  # Config.fromfile reports missing and invalid files
    raise UnknownNameError(
        f"no recipe is named '{name}'{did_you_mean(name, recipes(config_dir))} "
        "(`slipstream recipes` lists all recipes; to use a configuration file, include its extension)"
    )


def is_composed(path: Path) -> bool:
    """Return whether a recipe is written in SuperGradients syntax and composed by Hydra.

    Raises:
        ConfigError: if the file cannot be read, or if it is a composed recipe whose extension is not `.yaml`.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    values = read_yaml(path)
    if "_base_" in values or not any(key in values for key in COMPOSED_KEYS):
        return False
    if path.suffix != ".yaml":
        raise ConfigError("Hydra requires the extension .yaml; rename the file", str(path))
    return True


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values in a YAML file, with interpolations unresolved, or an empty dict if they are not a mapping.

    Raises:
        ConfigError: if the file cannot be read or parsed. The message names the file and the line.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    return values if isinstance(values, dict) else {}
