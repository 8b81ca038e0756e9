"""Load a checkpoint's weights into a model and report mismatches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError

__all__ = ["compare_weights", "load_weights", "loaded_names", "revise"]

_MAX_LISTED_NAMES = 5


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
        strict: require that all names and shapes match. If False, tensors that do not match (such as a head with
            a different number of classes) are skipped and reported.
        source: how error messages refer to the checkpoint.

    Returns:
        One line per kind of mismatch; empty if everything matches.

    Raises:
        CheckpointError: `strict` is True and names or shapes differ; most shapes differ; or no name matches.
    """
    state = _renamed(model, state)
    lines, shapes = compare_weights(model, state, strict, source)
    model.load_state_dict({key: value for key, value in state.items() if key not in shapes}, strict=False)
    return lines


def loaded_names(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors in the unwrapped model that `load_weights` loads from `state`."""
    state = _renamed(model, state)
    return {
        key
        for key, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and key in state and _shape(state[key]) == _shape(value)
    }


def compare_weights(
    model: nn.Module, state: Mapping[str, Any], strict: bool, source: str = "the checkpoint"
) -> tuple[list[str], list[str]]:
    """Return what `load_weights` would return and the names of tensors whose shapes differ, without loading anything.

    Raises:
        CheckpointError: see `load_weights`.
    """
    own, state = model.state_dict(), _renamed(model, state)
    missing = [key for key in own if key not in state]
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
        raise CheckpointError(
            f"{source} belongs to a different model: {'; '.join(_differences(missing, unexpected))}. Use a "
            "checkpoint of this model, or rename the keys with revise_keys"
        )
    if own and len(missing) == len(own):
        raise CheckpointError(
            f"{source} contains none of this model's tensors. It contains {_abbreviate(unexpected)}; the model "
            f"requires {_abbreviate(missing)}. Rename the keys with revise_keys, or check the model"
        )
    skipped = [f"skipped because of different shapes: {_abbreviate([*shapes.values()])}"] if shapes else []
    return [*_differences(missing, unexpected), *skipped], list(shapes)


def _renamed(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the modules' load_state_dict pre-hooks, which rename old keys, to a copy of `state` and return it.

    torch calls these hooks again in `load_state_dict`, after the names are compared. The second call has no effect.
    """
    state = dict(state)
    for name, module in model.named_modules():
        for hook in module._load_state_dict_pre_hooks.values():
            hook(state, f"{name}." if name else "", {}, False, [], [], [])
    return state


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _differences(missing: list[str], unexpected: list[str]) -> list[str]:
    lines = [f"missing keys: {_abbreviate(missing)}"] if missing else []
    return [*lines, f"unexpected keys: {_abbreviate(unexpected)}"] if unexpected else lines


def _abbreviate(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more
