"""Type checks, conversions, imports, and decorators for deprecated functions and functions with prerequisites."""

from __future__ import annotations

import functools
import importlib
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slipstream.errors import MissingPackageError

__all__ = [
    "apply_to",
    "check_prerequisites",
    "concat_list",
    "deprecated_api_warning",
    "deprecated_function",
    "get_object_from_string",
    "has_method",
    "import_modules_from_strings",
    "is_list_of",
    "is_method_overridden",
    "is_seq_of",
    "is_str",
    "is_tuple_of",
    "iter_cast",
    "list_cast",
    "requires_executable",
    "requires_package",
    "slice_list",
    "to_1tuple",
    "to_2tuple",
    "to_3tuple",
    "to_4tuple",
    "to_ntuple",
    "tuple_cast",
]


def to_ntuple(n: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that converts an iterable to a tuple, and repeats any other value `n` times."""

    def convert(value: Any) -> tuple[Any, ...]:
        return tuple(value) if isinstance(value, Iterable) else (value,) * n

    return convert


to_1tuple, to_2tuple, to_3tuple, to_4tuple = (to_ntuple(n) for n in range(1, 5))


def is_str(x: Any) -> bool:
    """Return whether `x` is a string."""
    return isinstance(x, str)


def is_seq_of(seq: Any, expected_type: Any, seq_type: Any = None) -> bool:
    """Return whether `seq` is a sequence (or a `seq_type`, if set) that contains only instances of `expected_type`."""
    return isinstance(seq, seq_type or Sequence) and all(isinstance(item, expected_type) for item in seq)


def is_list_of(seq: Any, expected_type: Any) -> bool:
    """Return whether `seq` is a list that contains only instances of `expected_type`."""
    return is_seq_of(seq, expected_type, list)


def is_tuple_of(seq: Any, expected_type: Any) -> bool:
    """Return whether `seq` is a tuple that contains only instances of `expected_type`."""
    return is_seq_of(seq, expected_type, tuple)


def iter_cast(inputs: Iterable[Any], dst_type: Callable[[Any], Any], return_type: Any = None) -> Any:
    """Convert each item with `dst_type` and, if `return_type` is set, the resulting iterator with `return_type`.

    Raises:
        TypeError: if `inputs` is not iterable.
    """
    items = map(dst_type, iter(inputs))
    return items if return_type is None else return_type(items)


def list_cast(inputs: Iterable[Any], dst_type: Callable[[Any], Any]) -> list[Any]:
    """Return a list of the items, converted with `dst_type`."""
    return [dst_type(item) for item in inputs]


def tuple_cast(inputs: Iterable[Any], dst_type: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return a tuple of the items, converted with `dst_type`."""
    return tuple(dst_type(item) for item in inputs)


def slice_list(in_list: list[Any], lens: int | Sequence[int]) -> list[list[Any]]:
    """Split a list into parts with the lengths `lens`. If `lens` is an int, all parts have this length.

    Raises:
        ValueError: if the lengths do not add up to the length of the list.
    """
    if isinstance(lens, int):
        assert len(in_list) % lens == 0, f"{len(in_list)} items cannot be split into parts of {lens} items"
        lens = [lens] * (len(in_list) // lens)
    if sum(lens) != len(in_list):
        raise ValueError(f"the lengths add up to {sum(lens)}, but the list has {len(in_list)} items")
    rest = iter(in_list)
    return [list(itertools.islice(rest, length)) for length in lens]


def concat_list(in_list: Iterable[list[Any]]) -> list[Any]:
    """Return the items of all lists in one list."""
    return list(itertools.chain(*in_list))


def apply_to(data: Any, expr: Callable[[Any], bool], apply_func: Callable[[Any], Any]) -> Any:
    """Apply `apply_func` to the values in nested containers for which `expr` returns True, and return the result."""
    if expr(data):
        return apply_func(data)
    if isinstance(data, dict):
        return type(data)({key: apply_to(value, expr, apply_func) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(apply_to(value, expr, apply_func) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(apply_to(value, expr, apply_func) for value in data)
    return data


def import_modules_from_strings(
    imports: str | Sequence[str] | None, allow_failed_imports: bool = False
) -> Any:
    """Import modules by name and return them.

    With `allow_failed_imports`, a module that cannot be imported is replaced by None, and a warning is issued.
    """
    if not imports:
        return None
    if isinstance(imports, str):
        return _import(imports, allow_failed_imports)
    return [_import(name, allow_failed_imports) for name in imports]


def _import(name: Any, allow_failure: bool) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"a module name must be a string, not {name!r}")
    try:
        return importlib.import_module(name)
    except ImportError:
        if not allow_failure:
            raise
        warnings.warn(f"the module '{name}' could not be imported and was ignored", stacklevel=3)
        return None


def get_object_from_string(obj_name: str) -> Any:
    """Return the object at a dotted import path, or None if it does not exist."""
    parts = obj_name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            return functools.reduce(getattr, parts[count:], target)
        except AttributeError:
            return None
    return None


def is_method_overridden(method: str, base_class: type, derived_class: Any) -> bool:
    """Return whether a class, or the class of an object, overrides a method of `base_class`."""
    assert isinstance(base_class, type), "base_class must be a class"
    derived = derived_class if isinstance(derived_class, type) else type(derived_class)
    return getattr(derived, method) is not getattr(base_class, method)


def has_method(obj: object, method: str) -> bool:
    """Return whether `obj` has a callable attribute `method`."""
    return callable(getattr(obj, method, None))


def check_prerequisites(
    prerequisites: str | Sequence[str],
    checker: Callable[[str], bool],
    msg_tmpl: str = "{} requires {}, which is missing",
) -> Any:
    """Decorate a function so that a call raises an error if `checker` returns False for a prerequisite."""
    names = [prerequisites] if isinstance(prerequisites, str) else prerequisites

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if missing := [name for name in names if not checker(name)]:
                raise MissingPackageError(msg_tmpl.format(function.__name__, ", ".join(missing)))
            return function(*args, **kwargs)

        return wrapper

    return wrap


def requires_package(prerequisites: str | Sequence[str]) -> Any:
    """Decorate a function that requires Python packages."""

    def installed(name: str) -> bool:
        try:
            importlib.import_module(name)
        except ImportError:
            return False
        return True

    return check_prerequisites(prerequisites, installed)


def requires_executable(prerequisites: str | Sequence[str]) -> Any:
    """Decorate a function that requires executables."""
    return check_prerequisites(prerequisites, lambda name: shutil.which(name) is not None)


def deprecated_api_warning(name_dict: dict[str, str], cls_name: str | None = None) -> Any:
    """Decorate a function so that it still accepts deprecated argument names, given as `{old: new}`."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        label = f"{cls_name}.{function.__name__}" if cls_name else function.__name__

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old, new in name_dict.items():
                if old not in kwargs:
                    continue
                assert new not in kwargs, f"{label} got both '{old}' and '{new}'; use '{new}'"
                warnings.warn(
                    f"the argument '{old}' of {label} is deprecated; use '{new}'",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return wrap


def deprecated_function(since: str, removed_in: str, instructions: str) -> Any:
    """Decorate a deprecated function so that calls issue a warning."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(
                f"{function.__name__} has been deprecated since {since} and will be removed in "
                f"{removed_in}; {instructions}",
                DeprecationWarning,
                stacklevel=2,
            )
            return function(*args, **kwargs)

        return wrapper

    return wrap
