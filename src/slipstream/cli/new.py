"""`slipstream new`: write a starter project."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.files import write_text

__all__ = ["run"]

_FILES = ("recipe.py", "shapes.py", "README.md")


def run(args: argparse.Namespace) -> int:
    """Write a recipe, its dataset and a README. The recipe can be used for training without changes.

    Raises:
        ConfigError: the folder cannot be created, or is not empty.
    """
    folder = Path(args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"the folder '{folder}' is not empty; choose a different folder")
        for name in _FILES:
            write_text(
                folder / name, (files("slipstream.cli") / "starter" / name).read_text(encoding="utf-8")
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write to '{folder}': {error.strerror or error}; choose a different folder"
        ) from error
    print(f"Written: {', '.join(str(folder / name) for name in _FILES)}")
    print(f"To train: cd {folder} && slipstream train recipe.py")
    return 0
