"""The recipes that come with the package: YAML files in the Runner's words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import UnknownNameError, did_you_mean

__all__ = ["find_recipe", "recipes"]

_FOLDER = Path(__file__).parent


def recipes() -> Mapping[str, str]:
    """Return what each recipe does, the comment in its first line, by its name."""
    found = {}
    for path in sorted(_FOLDER.glob("[a-z]*.yaml")):
        with path.open(encoding="utf-8") as file:
            found[path.stem] = file.readline().lstrip("# ").strip()
    return found


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by its name or as a configuration file of the user's.

    Raises:
        UnknownNameError: there is neither.
    """
    if (own := _FOLDER / f"{name}.yaml").is_file() and "/" not in name:
        return own
    if Path(name).suffix in (".py", ".yaml", ".yml", ".json", ".toml"):
        return Path(name)  # Config.fromfile says what is wrong with it
    raise UnknownNameError(
        f"there is no recipe '{name}'{did_you_mean(name, recipes())} "
        "('slipstream recipes' lists them; a configuration file is given with its ending)"
    )
