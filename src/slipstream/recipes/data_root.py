"""The `data_root_dir` shortcut for recipes that contain the paths of their datasets."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

__all__ = ["set_data_root"]

_SECTIONS = tuple(f"{split}_dataset_params" for split in ("train", "val", "test"))
_ROOTS = ("root_dir", "root", "data_root", "data_dir")
_SHORTCUT = "data_root_dir"


def set_data_root(values: Mapping[str, Any], raw: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Replace hard-coded dataset folders if `data_root_dir` is among the overrides.

    The common parent of all hard-coded folders is replaced, so the subfolders of training and validation images are
    kept. For example, `data_root_dir=DIR` changes /data/imagenet/train and /data/imagenet/val to DIR/train and DIR/val.
    Folders that the recipe derives from `data_root_dir`, or that another override sets, are not replaced. A warning is
    logged if the recipe sets no dataset folder.

    Args:
        values: the composed recipe; its `dataset_params` are changed.
        raw: the recipe before interpolations are resolved.
        overrides: overrides from the command line.
    """
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    if _SHORTCUT not in keys or not (folder := values.get(_SHORTCUT)):
        return
    data, raw_data = _section(values, "dataset_params"), _section(raw, "dataset_params")
    derived, hard_coded = False, []
    for section in _SECTIONS:
        params, raw_params = _section(data, section), _section(raw_data, section)
        for key in _ROOTS:
            if not isinstance(params.get(key), str):
                continue
            if _SHORTCUT in str(raw_params.get(key)) or f"dataset_params.{section}.{key}" in keys:
                derived = True
            else:
                hard_coded.append((params, key))
    if hard_coded:
        common = os.path.commonpath([str(PurePosixPath(params[key])) for params, key in hard_coded])
        for params, key in hard_coded:
            subfolder = PurePosixPath(params[key]).relative_to(common)
            params[key] = str(PurePosixPath(str(folder)) / subfolder)
    elif not derived:
        logging.getLogger("slipstream").warning(
            "data_root_dir=%s has no effect, because this recipe sets no dataset folder (%s)",
            folder,
            ", ".join(_ROOTS),
        )


def _section(values: Mapping[str, Any], key: str) -> Any:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
