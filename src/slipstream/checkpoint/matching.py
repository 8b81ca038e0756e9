"""Check the entries of a checkpoint against the objects of a run before these objects are modified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.checkpoint.schema import OPTIMIZER, check, describe_value, is_readable
from slipstream.errors import CheckpointError
from slipstream.typecheck import is_real

__all__ = ["MismatchError", "check_like", "check_optimizer", "check_tensors", "restoring"]

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


_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""Entries in the state of torch's optimizers that have a single element."""
_STATES: Mapping[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": (),
}
"""The entries that torch's optimizers require in a parameter's state."""
_STATES_OF_OPTIONS = {
    ("Adam", "amsgrad"): "max_exp_avg_sq",
    ("AdamW", "amsgrad"): "max_exp_avg_sq",
    ("RMSprop", "centered"): "grad_avg",
    ("RMSprop", "momentum"): "momentum_buffer",
}
"""The entries that torch's optimizers additionally require if an option is set."""
_SHAPED = frozenset({"momentum_buffer", *chain(*_STATES.values(), _STATES_OF_OPTIONS.values())}) - _SCALARS
"""Entries in the state of torch's optimizers that have the shape of the parameter."""
_NOT_NEGATIVE = ("lr", "initial_lr", "weight_decay", "momentum", "eps")
_REPLACED = ("params", "fused", "foreach", "capturable")
"""Keys of a parameter group whose saved values are replaced with the run's values."""
_COUNTERS = ("_global_step", "_step_count", "num_bad_epochs", "cooldown_counter")


@contextmanager
def restoring(key: str, source: Any) -> Iterator[None]:
    """Raise a CheckpointError in place of any error that occurs while `key` is being restored."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the entry can have any structure
        raise CheckpointError(
            f"{source}: '{key}' cannot be restored ({type(error).__name__}: {error}). The run may be only partly "
            "restored; create a new Runner before training"
        ) from error


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
            _check_tensor(target, value, f"{where}.{name}", source, shapes, layouts)
            if torch.promote_types(value.dtype, target.dtype) != target.dtype:
                warn(f"{source}: '{where}.{name}' will be rounded from {value.dtype} to {target.dtype}")


def _check_tensor(
    own: Tensor, saved: Any, where: str, source: Any, shape: bool = True, layout: bool = True
) -> None:
    text = f"a {own.dtype} tensor" + f" of shape {tuple(own.shape)}" * shape
    fits = (
        isinstance(saved, Tensor)
        and (saved.layout is own.layout or not layout)
        and saved.is_meta == own.is_meta
        and saved.is_quantized == own.is_quantized
        and _kind(saved) == _kind(own)
        and (not shape or saved.shape == own.shape)
    )
    if not fits:
        raise _different(where, text, saved, source)


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "float"
    return "complex" if tensor.is_complex() else "bool" if tensor.dtype is torch.bool else "int"


def _different(where: str, text: str, saved: Any, source: Any) -> MismatchError:
    return MismatchError(
        f"{source}: '{where}' must be {text} in this run, not {describe_value(saved)}",
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
                _check_counter(key, value, saved[key], f"{where}.{key}", source)
            elif not isinstance(value, bool):  # flags differ between versions of torch
                raise MismatchError(
                    f"{source}: '{where}.{key}' is missing", "; use load_from to start a new run"
                )
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(own):
            raise _different(where, f"a list of {len(own)} values", saved, source)
        for index, (value, other) in enumerate(zip(own, saved, strict=True)):
            check_like(value, other, f"{where}[{index}]", source)
    elif isinstance(own, bool | str):
        if type(saved) is not type(own):
            raise _different(where, f"a {type(own).__name__}", saved, source)
    elif (isinstance(own, int | float) or _is_number_tensor(own)) and not _is_numeric(saved):
        raise _different(where, "a number", saved, source)


def _check_counter(key: Any, own: Any, saved: Any, where: str, source: Any) -> None:
    low = {"last_step": -1, "last_epoch": -1}.get(key, 0 if key in _COUNTERS else None)
    if low is not None and isinstance(own, int) and not (isinstance(saved, int) and low <= saved < 2**63):
        raise _different(where, f"an integer greater than or equal to {low}", saved, source)


def _is_number_tensor(value: Any) -> TypeGuard[Tensor]:
    return is_readable(value) and value.dim() == 0 and value.is_floating_point()


def _is_numeric(value: Any) -> bool:
    if _is_number_tensor(value):
        return not bool(value.isnan())
    return is_real(value) and not math.isnan(value)


# ---- optimizers ----------------------------------------------------------------------------------------


def check_optimizer(
    optimizer: Optimizer, saved: Any, where: str, source: Any, warn: Warn | None = None
) -> None:
    """Check that `saved` is a valid state for `optimizer`.

    Parameter states are checked only for the `torch.optim` optimizers in `_STATES` and their subclasses, because the
    structure of other states is unknown. For these optimizers, `warn` is called if parameters lack an expected state.

    Raises:
        CheckpointError: the groups or their sizes differ, or an option or a state is missing or invalid.
    """
    check(saved, OPTIMIZER, source, where)
    groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in groups] != sizes:
        raise MismatchError(
            f"{source}: the groups in '{where}.param_groups' contain "
            f"{[len(group['params']) for group in groups]} parameters, but the optimizer's groups contain {sizes}",
            ". Resume with the same optimizer and paramwise_cfg, or start a new run with load_from",
        )
    for index, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        _check_group(optimizer.defaults, own, group, f"{where}.param_groups[{index}]", source)
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    indices = list(chain.from_iterable(group["params"] for group in groups))
    if sorted(indices) != indices or len({*indices}) != len({*map(id, params)}):
        raise MismatchError(
            f"{source}: '{where}.param_groups' must contain parameter indices in ascending order, not {indices[:20]}",
            "; use load_from to start a new run from the weights",
        )
    _check_states(optimizer, dict(zip(indices, params, strict=True)), saved, where, source, warn)


def _check_states(
    optimizer: Optimizer,
    params: Mapping[int, Tensor],
    saved: Mapping[str, Any],
    where: str,
    source: Any,
    warn: Warn | None,
) -> None:
    inner = getattr(optimizer, "optim", optimizer)  # the inner optimizer of a ZeroRedundancyOptimizer
    kinds = [kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.optim.")]
    kind = next((name for name in kinds if name in _STATES), None)
    groups = {index: group for group in saved["param_groups"] for index in group["params"]}
    for index, state in saved["state"].items():
        place = f"{where}.state[{index!r}]"
        if not isinstance(state, Mapping):
            raise _different(place, "a dict", state, source)
        if kind is None:
            continue
        if index not in params:
            raise MismatchError(
                f"{source}: '{place}' does not belong to any of the {len(params)} parameters",
                "; use load_from to start a new run from the weights",
            )
        extra = [
            name
            for (optimizer_name, option), name in _STATES_OF_OPTIONS.items()
            if optimizer_name == kind and groups[index].get(option)
        ]
        missing = [name for name in (*_STATES[kind], *extra) if name not in state]
        if missing and (state or kind != "SGD"):
            raise MismatchError(
                f"{source}: '{place}.{missing[0]}' is missing",
                "; use load_from to start a new run from the weights",
            )
        _check_state(params[index], state, kind == "SGD", place, source)

    stateless = [n for n, p in params.items() if p.requires_grad and not saved["state"].get(n)]
    stateful = kind is not None and (kind != "SGD" or any(g.get("momentum") for g in saved["param_groups"]))
    if warn is not None and stateless and stateful:
        warn(
            f"{source}: '{where}.state' has no entries for the parameters {stateless[:5]}: either their gradients were "
            "None, or the entries were lost. The optimizer will initialize new entries"
        )


def _check_state(param: Tensor, state: Mapping[str, Any], may_be_none: bool, where: str, source: Any) -> None:
    for name, value in state.items():
        place = f"{where}.{name}"
        if name in _SCALARS:
            number = value.reshape(()) if is_readable(value) and value.numel() == 1 else value
            exact = is_readable(number) and number.dim() == 0 and _kind(number) == "int"
            if not (exact or _is_numeric(number)) or not 0 <= float(number) < math.inf:
                raise _different(place, "a finite, non-negative number", value, source)
        elif name in _SHAPED and not (value is None and may_be_none):
            _check_tensor(param, value, place, source)


def _check_group(
    defaults: Mapping[str, Any], own: Mapping[str, Any], group: Mapping[str, Any], where: str, source: Any
) -> None:
    for key, value in own.items():
        if key in _REPLACED:
            continue
        if key in group:
            check_like(value, group[key], f"{where}.{key}", source)
        elif key in defaults and isinstance(value, int | float | tuple) and not isinstance(value, bool):
            raise MismatchError(f"{source}: '{where}.{key}' is missing", "; use load_from to start a new run")
    for key in _NOT_NEGATIVE:
        value = group.get(key, 0)
        if _is_numeric(value) and not 0 <= float(value) < math.inf:
            raise _different(f"{where}.{key}", "a finite, non-negative number", value, source)
    betas = group.get("betas", ())
    if not all(0 <= float(beta) <= 1 for beta in betas):
        raise _different(f"{where}.betas", "numbers between 0 and 1", str(betas), source)
