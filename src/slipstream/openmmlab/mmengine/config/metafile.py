"""Read the models listed in the metafiles of installed libraries (`model-index.yml` and the files that it imports)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.config.load import library_folder
from slipstream.errors import ConfigError
from slipstream.openmmlab.mmengine.config.packages import MODULE2PACKAGE
from slipstream.openmmlab.mmengine.fileio import load

__all__ = ["iter_models", "repo_or_mim_folder", "split_config_name"]


def split_config_name(name: str) -> tuple[str, str]:
    """Split a name such as `mmdet::retinanet/NAME.py` into the library and the configuration.

    Raises:
        ConfigError: if the name does not have this form, or the library is not an OpenMMLab library.
    """
    match = re.fullmatch(r"(\w+)::([^:/]+/[^:]+)", name)
    if match is None:
        raise ConfigError(f"'{name}' must have the form 'mmdet::retinanet/NAME.py'")
    library, config = match.groups()
    if library not in MODULE2PACKAGE:
        raise ConfigError(f"'{library}' is not one of {', '.join(MODULE2PACKAGE)}")
    return library, config


def repo_or_mim_folder(library: str) -> Path:
    """Return the folder that contains a library's `configs` folder: its source folder, or `.mim` in its package.

    Raises:
        ConfigError: if the library is unknown, is not installed or has no configurations.
    """
    if library not in MODULE2PACKAGE:
        raise ConfigError(f"'{library}' is not one of {', '.join(MODULE2PACKAGE)}", "scope")
    package = library_folder(library, f"{library} (pip install {MODULE2PACKAGE[library]})")
    for folder in (package.parent, package / ".mim"):
        if (folder / "configs").is_dir():
            return folder
    raise ConfigError(
        f"{package} contains no configurations; reinstall {library} from a package that includes `.mim/configs`"
    )


def iter_models(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the model entries from the metafiles that the folder's `model-index.yml` imports."""
    for path in load(str(folder / "model-index.yml"))["Import"]:
        yield from load(str(folder / path)).get("Models") or ()
