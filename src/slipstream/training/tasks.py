"""Reject recipes for unsupported tasks before reading any other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["SUPPORTED", "check_task"]

SUPPORTED = "semantic segmentation and image classification"
_TASKS = {
    "pose estimation": re.compile(r"pose|dekr|rescoring|keypoint", re.IGNORECASE),
    "object detection": re.compile(
        r"yolo|(?<![a-z])ssd|detection|roboflow|coco2017_(train|val)", re.IGNORECASE
    ),
    "quantization": re.compile(r"QATRecipeModificationCallback|PTQRecipeModificationCallback"),
}
_REMEDIES = {
    "quantization": "remove pre_launch_callbacks_list",
}


def check_task(recipe: Mapping[str, Any]) -> None:
    """Check that a recipe's task is supported, based on its network, data loaders, datasets and pre-launch callbacks.

    Args:
        recipe: a recipe, which may contain unresolved interpolations.

    Raises:
        ConfigError: if the task is pose estimation, object detection or quantization.
    """
    for path, name in _names(recipe):
        for task, pattern in _TASKS.items():
            if pattern.search(name):
                remedy = f"; {_REMEDIES[task]}" if task in _REMEDIES else ""
                raise ConfigError(
                    f"'{name}' is for {task}, which is not supported. Recipes support {SUPPORTED}{remedy}",
                    path,
                )


def _names(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the config path and the value of each name that determines the task."""
    candidates = [(key, recipe.get(key)) for key in ("architecture", "train_dataloader", "val_dataloader")]
    data = recipe.get("dataset_params")
    for section in ("train_dataloader_params", "val_dataloader_params"):
        loader = data.get(section) if isinstance(data, Mapping) else None
        if isinstance(loader, Mapping):
            candidates.append((f"dataset_params.{section}.dataset", loader.get("dataset")))
    for entry in recipe.get("pre_launch_callbacks_list") or ():
        candidates.append(
            ("pre_launch_callbacks_list", entry if isinstance(entry, str) else next(iter(entry), None))
        )
    return [(path, name) for path, name in candidates if isinstance(name, str) and "${" not in name]
