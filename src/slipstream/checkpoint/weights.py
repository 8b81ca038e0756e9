"""Load a checkpoint's weights into a model and report mismatches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slipstream.checkpoint.matching import MismatchError, Schema, check
from slipstream.errors import CheckpointError, ConfigError

__all__ = ["compare_weights", "load_weights", "loaded_names", "revise", "step_average", "weights_in"]

_MAX_LISTED_NAMES = 5


# The entries in which training programs save weights. The first one that contains a tensor is used.
_ENTRIES = (
    "state_dict",
    "model_state_dict",
    "ema_net",
    "model_ema",
    "state_dict_ema",
    "ema",
    "model",
    "net",
    "module",
)


def _weights_entry(checkpoint: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the entry that contains the weights, such as `checkpoint["ema"]["module"]`, or `checkpoint` itself."""
    entries = (checkpoint[key] for key in _ENTRIES if isinstance(checkpoint.get(key), Mapping))
    found = map(_weights_entry, entries)
    return next(
        (entry for entry in found if any(isinstance(v, torch.Tensor) for v in entry.values())), checkpoint
    )


def weights_in(checkpoint: Mapping[Any, Any], source: Any) -> dict[str, Any]:
    """Return the entry of a checkpoint that contains the weights, or the tensors in a checkpoint without such an entry.

    If a training step from `slipstream.accelerate` saved the file with an average of the weights that has been updated,
    the average is returned instead of the weights, as for a Runner's checkpoint, whose `state_dict` contains the
    average.

    Raises:
        CheckpointError: the entry is not a dict, one of its keys is not a string, or there are no weights.
    """
    state = checkpoint["state_dict"] if "state_dict" in checkpoint else _weights_entry(checkpoint)
    check({"state_dict": state}, Schema({"state_dict": dict[str, Any]}), source)
    if "state_dict" not in checkpoint:
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        if state and not tensors:
            raise CheckpointError(
                f"{source} contains no weights: none of its entries {sorted(state, key=str)} is a tensor or one of "
                f"{', '.join(_ENTRIES)}; use a checkpoint or a state dict"
            )
        state = tensors
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
    """Return `state` with each `(pattern, replacement)` pair applied to its keys, as in `re.sub`.

    Raises:
        ConfigError: a pair is invalid, or gives two tensors the same name.
    """
    for pair in revise_keys:
        try:
            pattern, replacement = pair
            revised = {re.sub(pattern, replacement, key): value for key, value in state.items()}
        except (re.error, TypeError, ValueError) as error:
            message = f"must be pairs of a regular expression and its replacement, not {pair!r} ({error})"
            raise ConfigError(message, "revise_keys") from error
        if len(revised) < len(state):
            raise ConfigError(f"{pair!r} gives several tensors the same name", "revise_keys")
        state = revised
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
    kept = {name: value for name, value in state.items() if name not in shapes}
    try:
        missing, unexpected = model.load_state_dict(kept, strict=False) or ([], [])  # may return None
    except RuntimeError as error:  # a pre-hook renamed a tensor of another shape
        raise CheckpointError(f"{source} belongs to a different model: {error}") from error
    if _renames(model):
        lines = [*_differences([name for name in missing if name not in shapes], unexpected), *lines]
        if strict and lines:
            raise _mismatch(source, lines)
    return lines


def _mismatch(source: str, lines: list[str]) -> MismatchError:
    return MismatchError(
        f"{source} belongs to a different model: {'; '.join(lines)}",
        ". Use a checkpoint from this model, or rename the keys with revise_keys",
    )


def _renames(model: nn.Module) -> bool:
    """Return whether a pre-hook may rename entries, in which case only torch can compare the names."""
    return any(module._load_state_dict_pre_hooks for module in model.modules())


def loaded_names(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors in the unwrapped model that `load_weights` loads from `state`."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if _renames(model):
        return set(own)
    return {name for name, value in own.items() if name in state and _fits(state[name], value)}


def compare_weights(
    model: nn.Module, state: Mapping[str, Any], strict: bool, source: str = "the checkpoint"
) -> tuple[list[str], list[str]]:
    """Return what `load_weights` would return and the names of tensors whose shapes differ, without loading anything.

    Raises:
        CheckpointError: see `load_weights`.
    """
    own, renames = model.state_dict(), _renames(model)
    missing = [] if renames else [key for key in own if key not in state]
    unexpected = [] if renames else [key for key in state if key not in own]
    shapes = {
        key: f"{key} is {_shape(state[key])} in the checkpoint and {_shape(value)} in the model"
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and key in state and not _fits(state[key], value)
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
        raise _mismatch(source, _differences(missing, unexpected))
    if own and len(missing) == len(own):
        raise CheckpointError(
            f"{source} contains none of this model's tensors. It contains {_abbreviate(unexpected)}; the model "
            f"requires {_abbreviate(missing)}. Rename the keys with revise_keys, or check the model"
        )
    skipped = [f"skipped because of different shapes: {_abbreviate([*shapes.values()])}"] if shapes else []
    return [*_differences(missing, unexpected), *skipped], list(shapes)


def _fits(saved: Any, own: torch.Tensor) -> bool:
    # torch initializes the parameters of lazy modules from the loaded tensors.
    return (is_lazy(own) and isinstance(saved, torch.Tensor)) or _shape(saved) == _shape(own)


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _differences(missing: list[str], unexpected: list[str]) -> list[str]:
    lines = [f"missing keys: {_abbreviate(missing)}"] if missing else []
    return [*lines, f"unexpected keys: {_abbreviate(unexpected)}"] if unexpected else lines


def _abbreviate(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more
