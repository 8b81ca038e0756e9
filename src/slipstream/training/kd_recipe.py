"""Keys of SuperGradients' knowledge distillation recipes (`architecture: kd_module`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.training.factories import configuration

__all__ = [
    "KEYS",
    "check_mode",
    "input_adapter",
    "is_distillation",
    "renamed_paths",
    "student_recipe",
    "teacher_arguments",
]

_SECTIONS = ("architecture", "arch_params", "checkpoint_params")
KEYS = (*(f"{role}_{key}" for role in ("student", "teacher") for key in _SECTIONS), "run_teacher_on_eval")
"""Keys that only knowledge distillation recipes have."""
_ADAPTERS = ("teacher_input_adapter", "student_input_adapter")


def is_distillation(recipe: Mapping[str, Any]) -> bool:
    """Return whether the recipe trains a student with a teacher."""
    return recipe.get("architecture") == "kd_module"


def student_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe that trains the student without a teacher."""
    return _recipe_for_role(recipe, "student")


def teacher_arguments(
    recipe: Mapping[str, Any], read: Callable[[Mapping[str, Any]], tuple[Any, Mapping[str, Any] | None]]
) -> dict[str, Any]:
    """Return the arguments of `DistillationModel` that describe the teacher.

    Args:
        recipe: a knowledge distillation recipe.
        read: function that returns the network and its pretrained weights for a recipe with a single network.

    Raises:
        ConfigError: if a key is missing, invalid or not supported.
    """
    check_mode(recipe.get("run_teacher_on_eval", True))
    teacher_recipe = _recipe_for_role(recipe, "teacher")
    weights = dict(teacher_recipe.get("checkpoint_params") or {})
    if weights.get("checkpoint_path"):
        weights["pretrained_weights"] = None  # the checkpoint takes precedence, as in SuperGradients
    with renamed_paths("teacher"):
        network, pretrained = read({**teacher_recipe, "checkpoint_params": weights})
    if pretrained is None and not network.get("pretrained"):  # timm's networks load their own weights
        raise ConfigError(
            "is required, because a student cannot learn from an untrained teacher; set it to the "
            "teacher's weights file",
            "teacher_checkpoint_params.checkpoint_path",
        )
    adapter = input_adapter(recipe.get("arch_params"), "arch_params")
    return {"teacher": network, "teacher_pretrained": pretrained, **adapter}


def input_adapter(options: Mapping[str, Any] | None, config_path: str) -> dict[str, Any]:
    """Return the adapter for the teacher's images, from SuperGradients' `kd_module` arguments.

    Raises:
        UnknownNameError: if an argument does not exist.
        ConfigError: if an adapter for the student is set.
    """
    adapters = {
        key: value for key, value in (options or {}).items() if value is not None and key != "num_classes"
    }
    for key in adapters:
        if key not in _ADAPTERS:
            raise UnknownNameError(f"unknown key{did_you_mean(str(key), _ADAPTERS)}", f"{config_path}.{key}")
    if "student_input_adapter" in adapters:
        raise ConfigError(
            "is not supported; normalize the images for the student in the dataset's transforms, and set "
            "teacher_input_adapter",
            f"{config_path}.student_input_adapter",
        )
    return {key: configuration(value, f"{config_path}.{key}") for key, value in adapters.items()}


def check_mode(run_teacher_on_eval: Any) -> None:
    """Raise a ConfigError unless `run_teacher_on_eval` is True or None."""
    if run_teacher_on_eval is not True and run_teacher_on_eval is not None:
        raise ConfigError(
            f"must be True, not {run_teacher_on_eval!r}; in training mode, each batch would change the teacher's "
            "BatchNorm statistics",
            "run_teacher_on_eval",
        )


@contextmanager
def renamed_paths(role: str | None) -> Iterator[None]:
    """Prefix the error paths that start with one of `_SECTIONS` with `student_` or `teacher_`; None adds no prefix."""
    try:
        yield
    except ConfigError as error:
        if role is not None and str(error.path or "").partition(".")[0] in _SECTIONS:
            error.path = f"{role}_{error.path}"
        raise


def _recipe_for_role(recipe: Mapping[str, Any], role: str) -> dict[str, Any]:
    kept = {key: value for key, value in recipe.items() if key not in (*KEYS, *_SECTIONS)}
    return kept | {key: recipe.get(f"{role}_{key}") for key in _SECTIONS}
