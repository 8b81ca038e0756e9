"""SuperGradients' functions for reading recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.extras import extra
from slipstream.files import check_name
from slipstream.recipes.compose import compose
from slipstream.recipes.find import FOLDER, read_yaml
from slipstream.training.params import TrainingParams, plain

__all__ = ["get", "load_recipe"]

_GROUP = "training_hyperparams"


def get(config_name: str, overriding_params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `training_params` from a recipe, or from a file in the `training_hyperparams` config group.

    Keys that the recipe does not set have their default values.

    Args:
        config_name: name of the recipe, such as `cifar10_resnet`, or of the file, such as
            `cifar10_resnet_train_params`; the name may be prefixed with the group.
        overriding_params: values that replace those of the recipe; None values have no effect.

    Raises:
        UnknownNameError: there is no such recipe or file.
    """
    name = config_name.removeprefix(f"{_GROUP}/").removesuffix(".yaml")
    overrides = {key: value for key, value in (overriding_params or {}).items() if value is not None}
    is_group_file = (FOLDER / _GROUP / f"{check_name(name, 'config_name', 'recipes')}.yaml").is_file()
    values = _values(name) if is_group_file else compose(name)[_GROUP]
    return {**vars(TrainingParams()), **values, **overrides}


def load_recipe(
    config_name: str, recipes_dir_path: str | Path | None = None, overrides: Sequence[str] | None = None
) -> Any:
    """Compose a recipe for `Trainer.train_from_config`, and return an OmegaConf container; see `compose`."""
    with extra("recipes"):
        from omegaconf import OmegaConf

    return OmegaConf.create(compose(config_name, overrides or (), recipes_dir_path))


def _values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = dict(plain(read_yaml(FOLDER / _GROUP / f"{name}.yaml")))
    parents = [entry for entry in values.pop("defaults", []) if entry != "_self_"]
    merged: dict[str, Any] = {}
    for entry in parents:
        merged |= _values(entry)
    return merged | values
