"""Types and ranges of a checkpoint's entries.

A rule is a function that yields one message for each mismatch. Unknown keys are accepted, so files from other engines
can be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from slipstream.checkpoint.random_state import random_state_problem
from slipstream.errors import CheckpointError
from slipstream.typecheck import is_real

__all__ = [
    "ACCELERATED",
    "ACCELERATED_FILE",
    "DESCRIPTION",
    "META",
    "OPTIMIZER",
    "PENDING",
    "RESUMED",
    "check",
    "describe_value",
    "is_readable",
    "step_average",
    "weights_in",
]

Rule = Callable[[Any, str], Iterator[str]]
_MAX_INT = 2**63 - 1


def check(value: Any, rule: Rule, source: Any, where: str = "") -> None:
    """Check `value` against `rule`.

    Args:
        source: name of the checkpoint in the message.
        where: location of `value` in the checkpoint.

    Raises:
        CheckpointError: `value` does not match; the message names the key.
    """
    for problem in rule(value, where):
        raise CheckpointError(
            f"{source}: {problem}. The file was modified after it was saved, or was written by a different program; "
            "use another checkpoint"
        )


def weights_in(checkpoint: Mapping[Any, Any], source: Any) -> dict[str, Any]:
    """Return the `state_dict` entry of a checkpoint, or the checkpoint itself if it has no such entry.

    If a training step from `slipstream.accelerate` saved the file with an average of the weights that has been updated,
    the average is returned instead of the weights, as for a Runner's checkpoint, whose `state_dict` contains the
    average.

    Raises:
        CheckpointError: the entry is not a dict, or one of its keys is not a string.
    """
    state = checkpoint.get("state_dict", checkpoint)
    check(state, _by_name(_anything), source, "state_dict")
    return {**state, **step_average(checkpoint, source)}


def step_average(checkpoint: Mapping[Any, Any], source: Any) -> dict[str, Any]:
    """Return the average of the weights in a file from `TrainStep.save`, or an empty dict if there is none.

    Raises:
        CheckpointError: the entry `step.average` is invalid.
    """
    step = checkpoint.get("step")
    if not isinstance(step, Mapping) or "average" not in step:
        return {}
    average = step["average"]
    check(average, _AVERAGE, source, "step.average")
    if not average["steps"]:  # before its first update, the average contains the initial weights
        return {}
    prefix = "module."
    return {name[len(prefix) :]: value for name, value in average.items() if name.startswith(prefix)}


def describe_value(value: Any) -> str:
    """Return a short description of `value` for a message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, bool | int | float | str) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return f"a {type(value).__name__}"


# ---- rules ---------------------------------------------------------------------------------------------


def _must_be(text: str, accepts: Callable[[Any], bool]) -> Rule:
    def rule(value: Any, where: str) -> Iterator[str]:
        if not accepts(value):
            yield f"'{where}' must be {text}, not {describe_value(value)}"

    return rule


def _is_integer(value: Any, low: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= _MAX_INT


def is_readable(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor with data."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _is_step(value: Any) -> bool:
    if isinstance(value, Tensor):
        exact = value.numel() == 1 and not value.is_floating_point() and not value.is_complex()
        return is_readable(value) and exact and value.dtype is not torch.bool and _is_integer(value.item())
    return _is_integer(value)


def _optional(rule: Rule) -> Rule:
    return lambda value, where: iter(()) if value is None else rule(value, where)


def _each(rule: Rule, length: int | None = None) -> Rule:
    """Accept a list or tuple whose elements match `rule`."""
    text = "a list" if length is None else f"a list of {length} values"
    is_list = _must_be(text, lambda v: isinstance(v, list | tuple) and length in (None, len(v)))

    def each(value: Any, where: str) -> Iterator[str]:
        yield from is_list(value, where)
        for index, element in enumerate(value):
            yield from rule(element, f"{where}[{index}]")

    return each


def _by_name(rule: Rule) -> Rule:
    """Accept a dict with string keys and values that match `rule`."""

    def by_name(value: Any, where: str) -> Iterator[str]:
        yield from _mapping(value, where)
        for key, element in value.items():
            if not isinstance(key, str):
                yield f"'{where}' must have string keys, not {describe_value(key)}"
            yield from rule(element, f"{where}.{key}")

    return by_name


def _entries(required: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None) -> Rule:
    """Accept a dict with all keys in `required`; check the values of these keys and of the keys in `optional`."""
    rules = {**required, **(optional or {})}

    def entries(value: Any, where: str) -> Iterator[str]:
        yield from _mapping(value, where)
        prefix = f"{where}." if where else ""
        for key in required:
            if key not in value:
                yield f"'{prefix}{key}' is missing"
        for key, rule in rules.items():
            if key in value:
                yield from rule(value[key], prefix + key)

    return entries


def _all(*rules: Rule) -> Rule:
    """Accept a value that matches every rule."""
    return lambda value, where: (problem for rule in rules for problem in rule(value, where))


def _tuple(*rules: Rule) -> Rule:
    """Accept a list or tuple with one element for each rule."""

    def tuple_rule(value: Any, where: str) -> Iterator[str]:
        yield from _each(_anything, len(rules))(value, where)
        for index, (rule, element) in enumerate(zip(rules, value, strict=True)):
            yield from rule(element, f"{where}[{index}]")

    return tuple_rule


def _anything(value: Any, where: str) -> Iterator[str]:
    return iter(())


def _random_state(value: Any, where: str) -> Iterator[str]:
    yield from _mapping(value, where)
    if (problem := random_state_problem(value)) is not None:
        yield f"'{where}.{problem[0]}' is not the state of a random number generator ({problem[1]})"


def _history(value: Any, where: str) -> Iterator[str]:
    yield from _all(_by_name(_anything), _entries(_HISTORY_KEYS))(value, where)
    if unknown := sorted(value.keys() - _HISTORY_KEYS.keys()):
        yield f"'{where}' must not contain the keys {unknown[:5]}"
    if len(value["log_history"]) != len(value["count_history"]):
        yield f"'log_history' and 'count_history' in '{where}' must have the same length"


def _message_hub(value: Any, where: str) -> Iterator[str]:
    if value is not None and not (isinstance(value, Mapping) and not value):  # an empty hub is not restored
        yield from _entries({"log_scalars": _by_name(_history), "runtime_info": _infos})(value, where)


def _infos(value: Any, where: str) -> Iterator[str]:
    """Check the entries of `runtime_info` that the engine's hooks read when a run resumes."""
    yield from _by_name(_anything)(value, where)
    for key, info in value.items():
        rule = next((rule for prefix, rule in _INFOS.items() if key.startswith(prefix)), _anything)
        yield from rule(info, f"{where}.{key}")


def _meta(value: Any, where: str) -> Iterator[str]:
    yield from _META(value, where)
    if "iter" in value and value.get("inner_samples", 0) > value["iter"] * value.get(
        "samples_per_step", _MAX_INT
    ):
        yield f"'{where}.inner_samples' must be at most iter x samples_per_step, not {value['inner_samples']}"


# ---- the entries of a checkpoint -----------------------------------------------------------------------

_mapping = _must_be("a dict", lambda v: isinstance(v, Mapping))
_tensor = _must_be("a tensor", lambda v: isinstance(v, Tensor))
_text = _must_be("a string", lambda v: isinstance(v, str))
_file = _must_be("a file name", lambda v: isinstance(v, str) and 0 < len(v) < 256 and "\0" not in v)
_boolean = _must_be("True or False", lambda v: isinstance(v, bool))
_number = _must_be("a number", is_real)
_count = _must_be("a non-negative integer", _is_integer)
_progress = _must_be("an integer from 0 to 2**40", lambda v: _is_integer(v) and v <= 2**40)
"""Products of these numbers with batch sizes must fit in 64 bits."""
_step = _must_be("a non-negative integer", _is_step)
_positive = _must_be("a positive integer", lambda v: _is_integer(v, 1))
_seed = _must_be("an integer", lambda v: _is_integer(v, -_MAX_INT))
_not_nan = _must_be("a number other than NaN", lambda v: is_real(v) and not math.isnan(v))
_tensors = _by_name(_tensor)


def _rates(value: Any, where: str) -> Iterator[str]:
    """Accept a number, or a dict that maps names to numbers."""
    yield from (_by_name(_number) if isinstance(value, Mapping) else _number)(value, where)


_HISTORY_KEYS: Mapping[str, Rule] = {
    "log_history": _each(_number),
    "count_history": _each(_positive),
    "max_length": _positive,
}
_INFOS: Mapping[str, Rule] = {
    "best_score/": _optional(_not_nan),
    "best_ckpt/": _optional(_file),
    "kept_ckpts/": _each(_file),
    "surplus_ckpts/": _each(_file),
    "replaced_ckpts/": _each(_tuple(_file, _count, _file)),
    "average_best": _each(_tuple(_not_nan, _file)),
    "early_stopping/": _tuple(_not_nan, _count),
    "lr_callback": _rates,
}
_META = _entries(
    {},
    {
        "epoch": _progress,
        "iter": _progress,
        "inner_samples": _progress,
        "samples_per_step": _positive,
        "epoch_length": _optional(_positive),
        "num_workers": _count,
        "validated": _boolean,
        "seed": _optional(_seed),
        "run_id": _text,
        "random_state": _optional(_each(_random_state)),
        "sampler_generators": _each(_by_name(_anything)),
        "cfg": _optional(_text),
    },
)


def _palette(value: Any, where: str) -> Iterator[str]:
    colors = value.tolist() if is_readable(value) else value
    yield from _each(_color)(colors, where)


_color = _each(_must_be("an integer from 0 to 255", lambda v: _is_integer(v) and v < 256), 3)
DESCRIPTION = _entries(
    {},
    {
        "cfg": _optional(_text),
        "dataset_meta": _optional(
            _entries({}, {"palette": _optional(_palette), "classes": _optional(_each(_text))})
        ),
    },
)
"""The entries of `meta` from which `slipstream predict` builds the model and colors the masks."""
_AVERAGE = _all(_by_name(_anything), _entries({"steps": _step}))
ACCELERATED = _entries(
    {"optimizer": _mapping, "steps": _count},
    {
        "average": _AVERAGE,
        "gradients": _each(_optional(_tensor)),
        "other_tensors": _each(_tensor),
        "unfinished": _count,
        "window": _positive,
    },
)
"""The state of a training step from `slipstream.accelerate`."""
ACCELERATED_FILE = _entries(
    {"state_dict": _by_name(_anything), "step": ACCELERATED},
    {"random_state": _each(_random_state), "values": _by_name(_anything)},
)
"""A file saved by a training step from `slipstream.accelerate`."""
META: Rule = _meta
"""The `meta` entry of a checkpoint that a run resumes from."""
OPTIMIZER = _entries({"state": _mapping, "param_groups": _each(_entries({"params": _each(_count)}))})
"""The state of one optimizer."""
PENDING = _entries(
    {},
    {
        "batches": _by_name(_count),
        "unfinished": _by_name(_count),
        "windows": _by_name(_positive),
        "gradients": _tensors,
        "rank_gradients": _each(_tensors),
    },
)
"""The batch counts and the accumulation window of each optimizer wrapper, and the gradients of unfinished windows."""
_COMM_HOOK = _entries({"step": _count, "errors": _each(_tensors), "factors": _tensors})
RESUMED = _entries(
    {},
    {
        "meta": META,
        "state_dict": _by_name(_anything),
        "ema_state_dict": _all(_by_name(_anything), _entries({"steps": _step})),
        "optimizer": _mapping,
        "message_hub": _message_hub,
        "gradients": _tensors,
        "rank_gradients": _each(_tensors),
        "comm_hook": _by_name(_COMM_HOOK),
    },
)
"""A checkpoint that a run resumes from."""
