"""Load a checkpoint's weights into a model and report mismatches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.checkpoint.matching import MismatchError, Schema, check
from slipstream.errors import CheckpointError

__all__ = ["compare_weights", "load_weights", "loaded_names", "revise", "step_average", "weights_in"]

_MAX_LISTED_NAMES = 5


def weights_in(checkpoint: Mapping[Any, Any], source: Any) -> dict[str, Any]:
    """Return the `state_dict` entry of a checkpoint, or the checkpoint itself if it has no such entry.

    If a training step from `slipstream.accelerate` saved the file with an average of the weights that has been updated,
    the average is returned instead of the weights, as for a Runner's checkpoint, whose `state_dict` contains the
    average.

    Raises:
        CheckpointError: the entry is not a dict, or one of its keys is not a string.
    """
    state = checkpoint.get("state_dict", checkpoint)
    check({"state_dict": state}, Schema({"state_dict": dict[str, Any]}), source)
    return {**state, **step_average(checkpoint)}


def step_average(checkpoint: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the average of the weights in a file from `TrainStep.save`, or an empty dict if there is none."""
    step = checkpoint.get("step")
    average = step.get("average") if isinstance(step, Mapping) else None
    if not isinstance(average, Mapping) or not average.get("steps"):
        return {}  # before its first update, the average contains the initial weights
    prefix = "module."
    return {name[len(prefix) :]: value for name, value in average.items() if name.startswith(prefix)}


def revise(state: Mapping[str, Any], revise_keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return `state` with each `(pattern, replacement)` pair applied to its keys, as in `re.sub`."""
    for pattern, replacement in revise_keys:
        state = {re.sub(pattern, replacement, key): value for key, value in state.items()}
    return dict(state)


def load_weights(
    model: nn.Module, state: Mapping[str, Any], strict: bool, source: str = "the checkpoint"
) -> list[str]:
    """Load `state` into the unwrapped model.

    Args:
        model: the model.
        state: mapping from names to tensors.
        strict: whether all names and shapes must match. If False, tensors that do not match (such as a head with
            a different number of classes) are skipped and reported.
        source: how error messages refer to the checkpoint.

    Returns:
        One line per kind of mismatch; empty if everything matches.

    Raises:
        CheckpointError: `strict` is True and names or shapes differ, more than half of the shapes differ, or no name
            matches.
    """
    lines, shapes = compare_weights(model, state, strict, source)
    with _without(model, shapes):
        model.load_state_dict(state, strict=False)
    return lines


@contextmanager
def _without(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """In the context, make `model.load_state_dict` ignore the tensors in `names`, even if a pre-hook renamed them."""

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in names:
            state.pop(name, None)

    owners = {name.rpartition(".")[0] for name in names}
    modules = [module for path, module in model.named_modules(remove_duplicate=False) if path in owners]
    handles = [module.register_load_state_dict_pre_hook(drop) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loaded_names(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors in the unwrapped model that `load_weights` loads from `state`."""
    own, renamed = _after_pre_hooks(model, state)
    consumed = state.keys() - renamed.keys()
    return {
        key
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
        and (key in consumed or (key in renamed and _shape(renamed[key]) == _shape(value)))
    }


def compare_weights(
    model: nn.Module, state: Mapping[str, Any], strict: bool, source: str = "the checkpoint"
) -> tuple[list[str], list[str]]:
    """Return what `load_weights` would return and the names of tensors whose shapes differ, without loading anything.

    Raises:
        CheckpointError: see `load_weights`.
    """
    original = state
    own, state = _after_pre_hooks(model, original)
    # A pre-hook can remove an entry that a state_dict hook added. The model's own tensors are always required.
    tensors = {
        name
        for entries in (model.named_parameters, model.named_buffers)
        for name, _ in entries(remove_duplicate=False)
    }
    missing = [key for key in own if key not in state and (key in tensors or key not in original)]
    unexpected = [key for key in state if key not in own]
    shapes = {
        key: f"{key} is {_shape(state[key])} in the checkpoint and {_shape(value)} in the model"
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and key in state and _shape(state[key]) != _shape(value)
    }
    not_tensors = any(not isinstance(state[key], torch.Tensor) for key in shapes)
    if shapes and (strict or not_tensors or 2 * len(shapes) > len(own)):
        raise CheckpointError(
            f"{source} belongs to a different model: {_abbreviate([*shapes.values()])}. Check the number of classes "
            "and the model's options"
        )
    if own and not state:
        raise CheckpointError(f"{source}: 'state_dict' is empty; use another checkpoint")
    if strict and (missing or unexpected):
        raise MismatchError(
            f"{source} belongs to a different model: {'; '.join(_differences(missing, unexpected))}",
            ". Use a checkpoint from this model, or rename the keys with revise_keys",
        )
    if own and len(missing) == len(own):
        raise CheckpointError(
            f"{source} contains none of this model's tensors. It contains {_abbreviate(unexpected)}; the model "
            f"requires {_abbreviate(missing)}. Rename the keys with revise_keys, or check the model"
        )
    skipped = [f"skipped because of different shapes: {_abbreviate([*shapes.values()])}"] if shapes else []
    return [*_differences(missing, unexpected), *skipped], list(shapes)


def _after_pre_hooks(model: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call the load_state_dict pre-hooks, which rename and remove entries, on a copy of `state`.

    torch calls these hooks again in `load_state_dict`. Therefore, the module attributes that they change are restored.

    Returns:
        The model's state dict after the hooks, which may change the shapes of the model's tensors, and the copy.
    """
    state = dict(state)
    modules = [(name, module) for name, module in model.named_modules() if module._load_state_dict_pre_hooks]
    attributes = [dict(vars(module)) for _, module in modules]
    try:
        for name, module in modules:
            for hook in module._load_state_dict_pre_hooks.values():
                hook(state, f"{name}." if name else "", {}, False, [], [], [])
        return model.state_dict(), state
    finally:
        for (_, module), before in zip(modules, attributes, strict=True):
            for name in vars(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _differences(missing: list[str], unexpected: list[str]) -> list[str]:
    lines = [f"missing keys: {_abbreviate(missing)}"] if missing else []
    return [*lines, f"unexpected keys: {_abbreviate(unexpected)}"] if unexpected else lines


def _abbreviate(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more
