"""Descriptions of the code and the settings of objects, from which the key of the cache is computed."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

__all__ = ["describe_callable", "describe_model", "digest"]

_COVERED = ("torch", "slipstream")
"""Packages whose versions are part of the key of the cache, so their code is not."""
_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has. This includes `training`, which trials set."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Seen = set[int]


def digest(value: Any) -> str:
    """Return a hash of the JSON form of a value, without memory addresses, which differ between processes."""
    text = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True, default=repr))
    return hashlib.sha256(text.encode()).hexdigest()


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Describe everything about a model that can change its training step, except the values of its tensors.

    The description contains the structure; the shapes, dtypes, strides and `requires_grad` of the tensors, and which of
    them are shared; the settings of the modules (`extra_repr`, and attributes that are numbers, strings, functions or
    lists of them); hooks; and the code of all classes that are not part of torch.
    """
    seen: _Seen = set()
    first: dict[int, str] = {}
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {
        "tensors": [
            [
                name,
                first.setdefault(id(tensor), name),
                list(tensor.shape),
                list(tensor.stride()) if not tensor.is_sparse else None,
                str(tensor.dtype),
                tensor.requires_grad,
                str(tensor.device),
            ]
            for name, tensor in tensors
        ],
        "modules": [[name, _describe_module(module, seen)] for name, module in model.named_modules()],
    }


def describe_callable(function: Any) -> Any:
    """Describe the code and the settings of a function, a method, a class, a module or another callable."""
    return _describe(function, set())


def _describe_module(module: nn.Module, seen: _Seen) -> list[Any]:
    kinds = [
        _describe_class(kind, seen)
        for kind in type(module).__mro__
        if kind is not object and not _covered(kind, "slipstream")
    ]
    settings = {
        name: _describe(value, seen)
        for name, value in vars(module).items()
        if name not in _INTERNAL and not isinstance(value, Tensor | nn.Module)
    }
    hooks = [
        [name, [_describe(hook, seen) for hook in getattr(module, name, {}).values()]] for name in _HOOKS
    ]
    kind = type(module)
    return [f"{kind.__module__}.{kind.__qualname__}", module.extra_repr(), kinds, settings, hooks]


def _describe(value: Any, seen: _Seen) -> Any:
    """Describe a value. The description of an object of an unknown class contains only the class."""
    if value is None or isinstance(value, bool | int | float | str | bytes | complex):
        return repr(value)
    if isinstance(value, nn.Module):
        return [_describe_module(module, seen) for module in value.modules()]
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, Mapping):
        return [[repr(key), _describe(item, seen)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_describe(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, functools.partial):
        return [_describe(part, seen) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [_describe(value.__func__, seen), _describe(value.__self__, seen)]
    if isinstance(value, FunctionType):
        return _describe_function(value, seen)
    if isinstance(value, type):
        return _describe_class(value, seen)
    if isinstance(value, BuiltinFunctionType):
        return value.__qualname__
    return _describe_class(type(value), seen)


def _describe_class(kind: type, seen: _Seen) -> list[Any]:
    """Describe the methods and the plain attributes of a class, without those of its bases."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if id(kind) in seen or kind.__module__ in ("builtins", "typing", "abc"):
        return [name]
    seen.add(id(kind))
    found = []
    for key, value in sorted(vars(kind).items()):
        for part in _functions(value):
            found.append([key, _describe_function(part, seen)])
        if isinstance(value, bool | int | float | str | tuple) and not key.startswith("__"):
            found.append([key, repr(value)])
    return [name, found]


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the Python functions in a class attribute: a method, a property, or a static or class method."""
    parts = (
        value,
        getattr(value, "__func__", None),
        *(getattr(value, n, None) for n in ("fget", "fset", "func")),
    )
    for part in parts:
        while part is not None and hasattr(part, "__wrapped__"):
            part = part.__wrapped__
        if isinstance(part, FunctionType):
            yield part


def _describe_function(function: Callable[..., Any], seen: _Seen) -> list[Any]:
    """Describe the code of a function, its default values, and the functions, classes and numbers that it refers to."""
    name = f"{function.__module__}.{function.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen or _covered(function, ""):
        return [name]
    seen.add(id(function))
    cells = [_cell(cell) for cell in getattr(function, "__closure__", None) or ()]
    used = [getattr(function, "__globals__", {}).get(name) for name in sorted(_names(code))]
    return [
        name,
        _content(code),
        _describe(getattr(function, "__defaults__", None), seen),
        _describe(getattr(function, "__kwdefaults__", None), seen),
        [_describe(cell, seen) for cell in cells],
        [_describe(value, seen) for value in used if _followed(value)],
    ]


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None


def _followed(value: Any) -> bool:
    plain = isinstance(value, bool | int | float | str)
    return plain or (
        isinstance(value, FunctionType | type) and not _covered(value, "") and not _installed(value)
    )


def _covered(value: Any, own: str) -> bool:
    """Return whether the code of a function or class is in a package of `_COVERED`, except the package `own`."""
    package = _package(value)
    return package in _COVERED and package != own


def _installed(value: Any) -> bool:
    """Return whether a function or class belongs to Python or to an installed package, which users do not edit."""
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    file = getattr(module, "__file__", None) or ""
    return _package(value) in sys.stdlib_module_names - {"__main__"} or "site-packages" in file


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _names(code: CodeType) -> set[str]:
    """Return the global names in a function and in the functions inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _content(code: CodeType) -> list[Any]:
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(_content(value))
        else:  # the order of a set differs between processes
            constants.append(sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value))
    return [code.co_code.hex(), code.co_names, constants]
