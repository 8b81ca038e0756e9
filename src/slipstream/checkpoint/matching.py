"""Check the entries of a checkpoint, and that they match a run, before any object of the run is modified."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from slipstream.errors import CheckpointError, ModelError, explained
from slipstream.plain_values import PLAIN_TYPES
from slipstream.typecheck import NonNegativeInt, PositiveInt, describe_with_article, is_real, matches

__all__ = [
    "ACCELERATED", "ACCELERATED_FILE", "DESCRIPTION", "META", "OPTIMIZER", "PENDING", "RESUMED",
    "MismatchError", "Schema", "check", "check_like", "check_optimizer", "check_restorable", "check_tensors",
    "restoring",
]  # fmt: skip

Warn = Callable[[str], None]


class MismatchError(CheckpointError):
    """An entry of a checkpoint does not match the run.

    Args:
        problem: description of the mismatch. Callers other than the Runner combine it with their own remedy.
        remedy: how to solve the problem in a Runner, preceded by the punctuation that separates it from `problem`.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return self.problem + self.remedy


# ---- types of the entries ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schema:
    """The keys of a dict and the types of their values. Other keys are accepted, so files can have more entries."""

    required: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)


def check(value: Any, schema: Schema, source: Any, where: str = "") -> None:
    """Check `value` against `schema`; `source` is the checkpoint's name, and `where` is the location of `value` in it.

    Raises:
        CheckpointError: an entry is missing or has a different type; the message names the key.
    """
    if not isinstance(value, Mapping):
        raise _damaged(source, f"'{where}' must be a dict, not {_describe(value)}")
    for key, kind in {**schema.required, **schema.optional}.items():
        place = f"{where}.{key}" if where else key
        if key not in value:
            if key in schema.required:
                raise _damaged(source, f"'{place}' is missing")
        elif isinstance(kind, Schema):
            check(value[key], kind, source, place)
        elif not matches(value[key], kind):
            raise _damaged(
                source, f"'{place}' must be {describe_with_article(kind)}, not {_describe(value[key])}"
            )


def _damaged(source: Any, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: {problem}. The file was modified after it was saved, or was written by a different program; use "
        "another checkpoint"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, bool | int | float | str) or value is None:
        return repr(value)[:80]
    return f"a {type(value).__name__}"


_Tensors = dict[str, Any]
_COUNTS = dict.fromkeys(("epoch", "iter", "inner_samples", "num_workers"), NonNegativeInt)
_STATES = {"random_state": list[dict[str, Any]] | None, "sampler_generators": list[dict[str, Any]]}
_TEXTS = {"run_id": str, "cfg": str | None, "seed": int | None, "validated": bool, "log_folder": str}
_SIZES = {"saved_at": float, "samples_per_step": PositiveInt, "epoch_length": PositiveInt | None}
_FROZEN = dict.fromkeys(("frozen", "frozen_at_start"), dict[str, list[str]] | None)
# The `meta` entry of a checkpoint that a run resumes from.
META = Schema(optional={**_COUNTS, **_STATES, **_TEXTS, **_SIZES, **_FROZEN})
# The entries of `meta` from which `slipstream predict` builds the model and colors the masks.
DESCRIPTION = Schema(optional={"cfg": str | None, "dataset_meta": dict[str, Any] | None})
# The state of a training step from `slipstream.accelerate`.
ACCELERATED = Schema(
    {"optimizer": dict[str, Any], "steps": NonNegativeInt},
    {
        "average": _Tensors,
        "gradients": list[Any],
        "other_tensors": list[Any],
        "unfinished": NonNegativeInt,
        "window": PositiveInt,
    },
)
# A file saved by a training step from `slipstream.accelerate`.
ACCELERATED_FILE = Schema(
    {"state_dict": _Tensors, "step": ACCELERATED},
    {"random_state": list[dict[str, Any]], "values": dict[str, Any]},
)
# The state of one optimizer.
OPTIMIZER = Schema({"state": Mapping, "param_groups": list[dict[str, Any]]})
# The batch counts and the accumulation window of each optimizer wrapper, and the gradients of unfinished windows.
PENDING = Schema(
    optional={
        "batches": dict[str, NonNegativeInt],
        "unfinished": dict[str, NonNegativeInt],
        "windows": dict[str, PositiveInt],
        "gradients": _Tensors,
        "rank_gradients": list[_Tensors],
    }
)
# A checkpoint that a run resumes from.
RESUMED = Schema(
    optional={
        "meta": META,
        "state_dict": _Tensors,
        "ema_state_dict": _Tensors,
        "optimizer": dict[str, Any],
        "message_hub": dict[str, Any] | None,
    }
)


# ---- entries that must match the run -------------------------------------------------------------------


def restoring(key: str, source: Any) -> AbstractContextManager[None]:
    """Raise a CheckpointError in place of any error that occurs while `key` is being restored."""
    remedy = "The run may be only partly restored; create a new Runner before training"
    return explained(CheckpointError, lambda why: f"{source}: '{key}' cannot be restored ({why}). {remedy}")


def check_tensors(
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    where: str,
    source: Any,
    warn: Warn,
    shapes: bool = True,
    layouts: bool = True,
) -> None:
    """Check that the tensors in `saved` can be copied into the tensors in `own` with the same names.

    Args:
        own: tensors in the run.
        saved: tensors in the checkpoint.
        where: location of `saved` in the checkpoint.
        source: name of the checkpoint in messages.
        warn: called with a message for each tensor whose values are rounded when copied.
        shapes: whether the shapes must be equal.
        layouts: whether the layouts must be equal. False for gradients, because a dense parameter can have a sparse
            gradient.

    Raises:
        CheckpointError: a tensor has a different shape, layout or kind of dtype (such as int instead of float).
    """
    for name, value in saved.items():
        if isinstance(target := own.get(name), Tensor):
            _check_tensor(target, value, f"{where}.{name}", source, shapes and not is_lazy(target), layouts)
            if torch.promote_types(value.dtype, target.dtype) != target.dtype:
                warn(f"{source}: '{where}.{name}' will be rounded from {value.dtype} to {target.dtype}")


def _check_tensor(
    own: Tensor, saved: Any, where: str, source: Any, shape: bool = True, layout: bool = True
) -> None:
    fits = (
        isinstance(saved, Tensor)
        and (saved.layout is own.layout or not layout)
        and _kind(saved) == _kind(own)
        and (not shape or saved.shape == own.shape)
    )
    if not fits:
        text = f"a {own.dtype} tensor" + f" of shape {tuple(own.shape)}" * shape
        raise _different(where, text, saved, source)


def _kind(tensor: Tensor) -> tuple[bool, ...]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool, tensor.is_quantized


def _different(where: str, text: str, saved: Any, source: Any) -> MismatchError:
    return MismatchError(
        f"{source}: '{where}' must be {text} in this run, not {_describe(saved)}",
        ". Resume with the configuration of the original run, or start a new run with load_from",
    )


def check_like(own: Any, saved: Any, where: str, source: Any) -> None:
    """Check that `saved` has the same keys, lengths and value types as `own`, the state of a new object.

    None in `own` matches any value. Keys that only `saved` contains are accepted, and `saved` may lack bool values.

    Raises:
        CheckpointError: the structures differ.
    """
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            raise _different(where, "a dict", saved, source)
        for key, value in own.items():
            if key in saved:
                check_like(value, saved[key], f"{where}.{key}", source)
            elif not isinstance(value, bool):  # flags differ between versions of torch
                raise MismatchError(
                    f"{source}: '{where}.{key}' is missing", "; use load_from to start a new run"
                )
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(own):
            raise _different(where, f"a list of {len(own)} values", saved, source)
        for index, (value, other) in enumerate(zip(own, saved, strict=True)):
            check_like(value, other, f"{where}[{index}]", source)
    elif isinstance(own, bool | str) and type(saved) is not type(own):
        raise _different(where, f"a {type(own).__name__}", saved, source)
    elif _is_number(own) and not _is_number(saved):
        raise _different(where, "a number", saved, source)


def _is_number(value: Any) -> bool:
    return is_real(value) or (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point())


# Entries in the state of torch's optimizers that have the shape of the parameter.
_SHAPED = (
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum",
)  # fmt: skip
# Keys of a parameter group whose saved values are replaced with the run's values.
_REPLACED = ("params", "fused", "foreach", "capturable")


def check_optimizer(optimizer: Optimizer, saved: Any, where: str, source: Any) -> None:
    """Check that `saved` is a state for `optimizer`: the groups, their options, and the shapes of torch's states.

    Raises:
        CheckpointError: the groups or their sizes differ, an option is missing, or a state has another shape.
    """
    check(saved, OPTIMIZER, source, where)
    groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group.get("params", ())) for group in groups]
    if saved_sizes != sizes:
        raise MismatchError(
            f"{source}: the groups in '{where}.param_groups' contain {saved_sizes} parameters, but the optimizer's "
            f"groups contain {sizes}",
            ". Resume with the same optimizer and paramwise_cfg, or start a new run with load_from",
        )
    for index, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        place = f"{where}.param_groups[{index}]"
        for key, value in own.items():
            if key in group and key not in _REPLACED:
                check_like(value, group[key], f"{place}.{key}", source)
            elif key in optimizer.defaults and matches(value, float | tuple) and key not in group:
                raise MismatchError(
                    f"{source}: '{place}.{key}' is missing", "; use load_from to start a new run"
                )
    inner = getattr(optimizer, "optim", optimizer)  # the inner optimizer of a ZeroRedundancyOptimizer
    if any(c is not Optimizer and c.__module__.startswith("torch.optim.") for c in type(inner).__mro__):
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        indices = chain.from_iterable(group["params"] for group in groups)
        for index, param in zip(indices, params, strict=True):
            for name, state in saved["state"].get(index, {}).items():
                if name in _SHAPED and state is not None and not is_lazy(param):
                    _check_tensor(param, state, f"{where}.state[{index}].{name}", source)


# ---- state that a checkpoint can contain ---------------------------------------------------------------

_STORABLE = (*PLAIN_TYPES, np.bool_, np.number, torch.dtype, torch.device, type(None), Tensor)


def check_restorable(state: Mapping[str, Any]) -> None:
    """Check that a model's `state_dict` can be saved and loaded without changes.

    Raises:
        ModelError: an entry contains a value that a checkpoint cannot contain, or a tensor that cannot be written to.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            if any(
                size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
            ):
                raise ModelError(
                    f"the model's buffer '{key}' is an expanded tensor. Several of its elements share memory, "
                    "so it cannot be loaded from a checkpoint; register a copy of it (tensor.clone())"
                )
        elif kind := _unsupported(value):
            raise ModelError(
                f"the model's state '{key}' contains an object of type {kind}, which cannot be restored from a "
                "checkpoint; return only tensors and built-in Python values (number, string, list, tuple, dict) from "
                "get_extra_state, and convert them in set_extra_state"
            )


def _unsupported(value: Any) -> str:
    """Return the name of the first type in `value` that a checkpoint omits or converts, or an empty string."""
    if type(value) in (dict, OrderedDict):
        value = [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return next(filter(None, map(_unsupported, value)), "")
    return "" if isinstance(value, _STORABLE) else type(value).__name__
