"""SuperGradients' recipe files: a complete folder, and files with older group names, resolvers and keys."""

import shutil
from pathlib import Path

_HERE = Path(__file__).parent
RECIPES = {path.stem: path.read_text() for path in sorted((_HERE / "super_gradients_2").glob("*.yaml"))}
"""Recipes in SuperGradients' format, including its group names, resolvers, `_target_` entries and deprecated keys."""


def write_recipes(folder: Path) -> Path:
    """Copy the recipe files to `folder`, and return `folder`."""
    return Path(shutil.copytree(_HERE / "super_gradients", folder, dirs_exist_ok=True))
