"""Describe the code and the settings of objects. The cache key is computed from these descriptions."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import re
import sys
import types
import typing
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from itertools import chain
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from slipstream.errors import SlipstreamError
from slipstream.tune.references import (
    global_names,
    imported_names,
    is_known,
    is_known_function,
    names_in,
    version_of,
)

__all__ = ["UndescribedError", "describe_callable", "describe_model", "digest"]

_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has, including `training`, which trials set."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_VALUES = 100_000
"""Maximum number of values in a description. A larger number indicates data rather than settings."""
_HEAP_TYPE = 1 << 9
"""Flag of heap types, which are classes created at run time. Most classes written in C do not have this flag."""
_REPR_TYPES = (
    bool
    | int
    | float
    | str
    | bytes
    | complex
    | range
    | slice
    | PurePath
    | re.Pattern
    | np.generic
    | np.dtype,
    torch.dtype | torch.device | torch.layout | torch.memory_format | torch.Size,
    types.NoneType | types.EllipsisType | types.NotImplementedType | types.GenericAlias | types.UnionType,
    typing.TypeVar | logging.Logger,
)
"""Classes whose instances are completely described by their `repr`."""
_NAME_TYPES = (
    np.ufunc,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
_TRANSPARENT = (
    object,
    dict,
    OrderedDict,
    defaultdict,
    types.MappingProxyType,
    list,
    tuple,
    set,
    frozenset,
    deque,
    types.SimpleNamespace,
)
"""Classes written in C whose instances have no state except their items and attributes."""
_METHODS = (staticmethod, classmethod, property)


class UndescribedError(SlipstreamError):
    """The state of a value cannot be read, so it cannot be part of the cache key."""


def digest(value: Any) -> str:
    """Return a hash of the JSON form of a value, without memory addresses, which differ between processes."""
    text = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True, default=repr))
    return hashlib.sha256(text.encode()).hexdigest()


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Describe everything about a model that can change its training step, except the values of its tensors.

    The description contains the structure; the shapes, dtypes, strides and `requires_grad` of the tensors, and which of
    them are shared; the settings of the modules (`extra_repr` and attributes); hooks; and the code of all classes and
    functions that do not belong to an installed package.

    Raises:
        UndescribedError: the state of a setting cannot be read.
    """
    return _Description().model(model)


def describe_callable(function: Any) -> Any:
    """Describe the code and the settings of a function, a method, a class, a module or another object.

    Raises:
        UndescribedError: the state of a setting cannot be read.
    """
    return _Description().value(function)


class _Description:
    """Describes values. An object that is already described, or that contains itself, is replaced by its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # keeps objects alive, because the id of a deleted object can be reused
        self._described_modules: set[tuple[str, frozenset[str]]] = set()
        self._count = 0

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Describe a module with its tensors and submodules."""
        modules = list(model.named_modules())
        for _, module in modules:
            self._number(module)  # attributes and hooks of any submodule can refer to other submodules
        first: dict[int, str] = {}
        tensors = chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        )
        return {
            "tensors": [
                [name, first.setdefault(id(tensor), name), *_tensor(tensor)] for name, tensor in tensors
            ],
            "modules": [[name, self._module(module)] for name, module in modules],
        }

    def value(self, value: Any) -> Any:
        """Describe any value.

        Raises:
            UndescribedError: the state of the value cannot be read, or there are too many values.
        """
        self._count += 1
        if self._count > _MAX_VALUES:
            raise UndescribedError(f"the description has more than {_MAX_VALUES:,} values")
        if (plain := _plain(value)) is not None:
            return plain
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, enum.Enum):
            return [value.name, self.value(value.value), self.value(type(value))]
        if isinstance(value, np.ndarray):
            return [list(value.shape), str(value.dtype)]
        if type(value) is tuple:
            return [self.value(item) for item in value]
        if isinstance(value, MethodType):
            return [self.value(value.__func__), self.value(value.__self__)]
        if isinstance(value, weakref.ref):
            return self.value(value())
        if (number := self._number(value)) is not None:
            return ["described as", number]
        return self._describe(value)

    def _number(self, value: Any) -> int | None:
        """Return the number of an object. If the object has no number, assign one and return None."""
        if (number := self._numbers.get(id(value))) is not None:
            return number
        self._numbers[id(value)] = len(self._numbers)
        self._objects.append(value)
        return None

    def _describe(self, value: Any) -> Any:
        """Describe an object that has not been described yet."""
        if isinstance(value, nn.Module):
            return self.model(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return self._module_attributes(value, None)
        if isinstance(value, staticmethod | classmethod):
            return self.value(value.__func__)
        if isinstance(value, property):
            return [self.value(part) for part in (value.fget, value.fset, value.fdel)]
        if isinstance(value, functools.cached_property):
            return self.value(value.func)
        if isinstance(value, functools.partial):
            return [self.value(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, functools._lru_cache_wrapper):
            return self.value(value.__wrapped__)
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            return [value.__qualname__, self.value(value.__self__)]
        if isinstance(value, Dataset):
            return self.value(type(value))  # the data is not part of the key
        return [self._contents(value), self._object(value)]

    def _contents(self, value: Any) -> Any:
        """Describe the items of a container; return None for other objects."""
        if isinstance(value, Mapping):
            return [[self.value(key), self.value(item)] for key, item in value.items()]
        if isinstance(value, list | tuple | deque):
            return [self.value(item) for item in value]
        if isinstance(value, set | frozenset):
            items = [_plain(item) for item in value]
            if None in items:
                raise UndescribedError(f"{type(value).__qualname__} contains objects without a stable order")
            return sorted(map(repr, items))
        return None

    def _object(self, value: Any) -> Any:
        """Describe the class and the attributes of an object."""
        kind = type(value)
        own = [base for base in kind.__mro__ if base not in _TRANSPARENT]
        # A class that seems to be written in Python, but whose instances have no attributes, may be written in C.
        readable = hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in own)
        if own and not (readable and all(map(_is_python, own))):
            raise UndescribedError(f"the state of an object of class {_name(kind)} cannot be read")
        slots = {
            name: getattr(value, name, None)
            for base in own
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        attributes = {**slots, **getattr(value, "__dict__", {})}
        return [self.value(kind), [[name, self.value(item)] for name, item in attributes.items()]]

    def _module(self, module: nn.Module) -> list[Any]:
        settings = [
            [name, self.value(value)] for name, value in vars(module).items() if name not in _INTERNAL
        ]
        hooks = [[name, [self.value(hook) for hook in getattr(module, name, {}).values()]] for name in _HOOKS]
        return [self.value(type(module)), _name(type(module)), module.extra_repr(), settings, hooks]

    def _class(self, kind: type) -> list[Any]:
        """Describe the bases, the methods and the attributes of a class."""
        if is_known(kind.__module__):
            return [_name(kind), version_of(kind.__module__)]
        members = [[base.__qualname__, self.value(base)] for base in kind.__bases__]
        # The fields of a named tuple are part of the description of its values.
        omitted = ("_abc_impl", *getattr(kind, "_fields", ()))
        for key, value in sorted(vars(kind).items()):
            special = key.startswith("__") and key.endswith("__")
            if key not in omitted and (not special or callable(value) or isinstance(value, _METHODS)):
                members.append([key, self.value(value)])
        return [_name(kind), members]

    def _function(self, function: FunctionType) -> list[Any]:
        """Describe a function: its code, default values and attributes, and the values that it refers to."""
        if is_known_function(function):
            return [_name(function), version_of(str(function.__module__))]
        code, scope = function.__code__, function.__globals__
        references = [(name, scope[name]) for name in sorted(global_names(code)) if name in scope]
        references += zip(code.co_freevars, map(_cell, function.__closure__ or ()), strict=True)
        for name in imported_names(code, scope):
            if name not in sys.modules and not is_known(name):
                raise UndescribedError(f"{_name(function)} imports {name}, which is not loaded yet")
            references.append((name, sys.modules.get(name)))
        names = names_in(code)
        return [
            _name(function),
            _content(code),
            self.value(function.__defaults__),
            self.value(function.__kwdefaults__),
            self.value(vars(function)),
            [
                [
                    name,
                    self._module_attributes(value, names)
                    if isinstance(value, ModuleType)
                    else self.value(value),
                ]
                for name, value in references
            ],
        ]

    def _module_attributes(self, module: ModuleType, names: frozenset[str] | None) -> list[Any]:
        """Describe the attributes of a module that are listed in `names`; None means that the names are unknown."""
        if is_known(module.__name__):
            return [module.__name__, version_of(module.__name__)]
        if names is None:
            raise UndescribedError(
                f"the module {module.__name__} is used as a value, so the attributes that are used cannot be determined"
            )
        if (module.__name__, names) in self._described_modules:
            return [module.__name__]
        self._described_modules.add((module.__name__, names))
        attributes = [(name, vars(module)[name]) for name in sorted(names & vars(module).keys())]
        return [
            module.__name__,
            [
                [
                    name,
                    self._module_attributes(value, names)
                    if isinstance(value, ModuleType)
                    else self.value(value),
                ]
                for name, value in attributes
            ],
        ]


def _plain(value: Any) -> str | None:
    """Describe a value that does not refer to other objects; return None for other values."""
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, _REPR_TYPES) or type(value).__module__ == "typing":
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"Generator on {value.device}"
    return _name(value) if isinstance(value, _NAME_TYPES) else None


def _tensor(tensor: Tensor) -> list[Any]:
    """Describe the metadata of a tensor."""
    return [
        list(tensor.shape),
        list(tensor.stride()) if tensor.layout == torch.strided else None,
        str(tensor.dtype),
        tensor.requires_grad,
        str(tensor.device),
    ]


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"


def _is_python(kind: type) -> bool:
    """Return whether a class is written in Python; if so, its instances have no state except their attributes."""
    module = sys.modules.get(kind.__module__)
    file = str(getattr(module, "__file__", None) or "")
    in_python = file.endswith(".py") or (not file and kind.__module__ not in sys.builtin_module_names)
    return bool(kind.__flags__ & _HEAP_TYPE) and in_python


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None


def _content(code: CodeType) -> list[Any]:
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(_content(value))
        else:  # sort sets, because their order differs between processes
            constants.append(sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value))
    return [code.co_code.hex(), code.co_names, constants]
