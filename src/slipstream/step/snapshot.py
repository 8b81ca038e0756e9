"""The Python objects and tensors that a call of a module can change, to repeat the call without side effects."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import CellType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.step.verification import copies

__all__ = ["RandomState", "Reachable", "Snapshot", "version_of"]

_CONTAINERS = (dict, list, deque, set)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Packages whose objects, except containers, do not contain the user's state.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}
_STRUCTURE = ("_parameters", "_modules", "_buffers", "_compiled_call_impl")
_DATA = (int, float, complex, str, tuple, type(None), Tensor, np.ndarray, *_CONTAINERS)


class RandomState:
    """The random states of torch (on the CPU and on a device), NumPy and Python."""

    def __init__(self, device: torch.device) -> None:
        self._states: list[tuple[str, Any, Callable[[Any], object]]] = [
            ("torch", torch.get_rng_state(), torch.set_rng_state),
            ("NumPy", np.random.get_state(), np.random.set_state),
            ("Python", random.getstate(), random.setstate),
        ]
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            restore = partial(module.set_rng_state, device=device)
            self._states.append(("the device", module.get_rng_state(device), restore))

    def restore(self) -> None:
        """Set the random states."""
        for _, state, restore in self._states:
            restore(state)

    def values(self) -> dict[str, Any]:
        """Return the states by name; they can be compared."""
        return {
            f"the random state of {name}": state if isinstance(state, Tensor) else pickle.dumps(state)
            for name, state, _ in self._states
        }


class Reachable:
    """The objects that can be reached from a module or from arguments.

    These are the attributes of modules, of their classes and of the user's objects, and the contents of containers.

    Args:
        skip_torch: whether to skip the attributes, except buffers, of modules whose class is part of torch.

    Attributes:
        values: tensors, arrays, generators, numbers and other values that are not containers, by name.
        contents: containers and their contents, which are not copied, by id.
        parameters: the parameters of the modules.
        norms: the buffers of BatchNorm, whose output in training does not depend on them, by id.
        problem: why a call cannot be repeated, or None.
    """

    def __init__(self, skip_torch: bool = False) -> None:
        self._skips_torch = skip_torch
        self.values: dict[str, Any] = {}
        self.contents: dict[int, tuple[Any, Any]] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.norms: dict[int, Any] = {}
        self.problem: str | None = None

    def add(self, root: Any, kind: str = "attribute") -> Reachable:
        """Add all objects that can be reached from `root`."""
        pending = deque([(kind, "", root)])
        while pending:
            pending.extend(self._add(*pending.popleft()))
        return self

    def leaves(self) -> dict[int, Any]:
        """Return the tensors, arrays and generators by id."""
        kinds = (Tensor, np.ndarray, *_GENERATORS)
        return {id(value): value for value in self.values.values() if isinstance(value, kinds)}

    def copied(self) -> dict[str, Any]:
        """Return `values`, with copies of tensors, arrays and generators."""
        copied = _copy(self.leaves())
        return {name: copied.get(id(value), value) for name, value in self.values.items()}

    def _add(self, kind: str, name: str, value: Any) -> Iterable[tuple[str, str, Any]]:
        """Add an object, and return the objects in it."""
        if isinstance(value, nn.Module):
            return self._add_module(name, value)
        if isinstance(value, tuple):
            return [(kind, f"{name}[{i}]", item) for i, item in enumerate(value)]
        if isinstance(value, _CONTAINERS):
            return self._add_container(kind, name, value)
        if isinstance(value, nn.Parameter):
            self.parameters[id(value)] = value
            return ()
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.problem = f"a call cannot be repeated, because the {kind} '{name}' is an iterator"
        elif _is_users(type(value)) and not isinstance(value, type) and hasattr(value, "__dict__"):
            return self._add_container(kind, name, vars(value))
        self.values[f"the {kind} '{name}'"] = value
        return ()

    def _add_module(self, name: str, module: nn.Module) -> Iterable[tuple[str, str, Any]]:
        if id(module._buffers) in self.contents:
            return ()
        if isinstance(module, _BatchNorm):
            self.norms |= {id(buffer): buffer for buffer in module.buffers()}
        self.parameters |= {id(param): param for param in module._parameters.values() if param is not None}
        prefix = f"{name}." if name else ""
        found = [("attribute", prefix + key, child) for key, child in module._modules.items()]
        found += self._add_container("buffer", name, module._buffers)
        kinds = [kind for kind in type(module).__mro__ if _is_users(kind)]
        if kinds or not self._skips_torch:
            found += self._add_container("attribute", name, vars(module))
        for kind in kinds:
            found += self._add_container("attribute", kind.__name__, kind)
        return found

    def _add_container(self, kind: str, name: str, container: Any) -> list[tuple[str, str, Any]]:
        if id(container) in self.contents:
            return []
        contents = _read(container)
        self.contents[id(container)] = container, contents
        if isinstance(contents, dict):
            prefix = f"{name}." if name else ""
            return [(kind, f"{prefix}{key}", value) for key, value in contents.items()]
        if isinstance(contents, set):
            self.values[f"the {kind} '{name}'"] = frozenset(contents)
            return []
        return [(kind, f"{name}[{i}]", value) for i, value in enumerate(contents)]


def _is_users(kind: type) -> bool:
    return kind is SimpleNamespace or kind.__module__.partition(".")[0] not in _LIBRARIES


def _read(container: Any) -> Any:
    """Return a shallow copy of the contents: a dict, a list or a set; for a tensor, a copy."""
    if isinstance(container, Tensor):
        return container.detach().clone()
    if isinstance(container, type):
        return {k: v for k, v in vars(container).items() if isinstance(v, _DATA) and not k.startswith("__")}
    if isinstance(container, CellType):
        return [container.cell_contents]
    if isinstance(container, dict):
        if "_modules" in container and "_buffers" in container:
            return {k: v for k, v in container.items() if k not in _STRUCTURE and "_hooks" not in k}
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _write(container: Any, contents: Any) -> None:
    """Replace the contents of a container, without calls of methods that the user has overridden."""
    if isinstance(container, Tensor):
        if not torch.equal(container, contents):
            container.detach().copy_(contents)
        return
    now = _read(container)
    if _is_same(now, contents):
        return
    if isinstance(container, CellType):
        (container.cell_contents,) = contents
    elif isinstance(container, type):
        for key in now.keys() - contents.keys():
            delattr(container, key)
        for key, value in contents.items():
            setattr(container, key, value)
    elif isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        for key in now:
            kind.__delitem__(container, key)
        for key, value in contents.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    else:
        container.clear()
        container.extend(contents) if isinstance(container, deque) else container.update(contents)


def _is_same(some: Any, others: Any) -> bool:
    """Return whether contents consist of the same objects, in the same order."""
    if isinstance(some, set):
        return bool(some == others)
    if isinstance(some, dict) and list(some) != list(others):
        return False
    return len(some) == len(others) and all(map(is_, _values(some), _values(others)))


def _values(contents: Any) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents


def _copy(leaves: Mapping[int, Any]) -> dict[int, Any]:
    """Return copies of tensors, arrays and generators, with the same keys."""
    tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor)}
    others = {key: copy.deepcopy(leaf) for key, leaf in leaves.items() if key not in tensors}
    return dict(zip(tensors, copies(list(tensors.values())), strict=True)) | others


def _replace(value: Any, new: Mapping[int, Any]) -> Any:
    """Return contents or a tuple in which `new` replaces objects by id."""

    def replaced(item: Any) -> Any:
        return _replace(item, new) if isinstance(item, tuple) else new.get(id(item), item)

    if isinstance(value, set):
        return value
    if isinstance(value, dict):
        return {key: replaced(item) for key, item in value.items()}
    items = list(map(replaced, value))
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def version_of(leaf: Any) -> Any:
    """Return a value that changes if a tensor or an array changes; None for other objects.

    It is always 0 for inference tensors, which do not count their changes.
    """
    if isinstance(leaf, Tensor):
        return 0 if leaf.is_inference() else leaf._version
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else None


class Snapshot:
    """The contents of all objects that a call of a module can change.

    Args:
        module: the module.
        arguments: a tuple of the arguments of the call.
        recomputes: whether the call is repeated by activation checkpointing. In this case, parameters, tensors in the
            arguments and the buffers of BatchNorm are not copied.

    Attributes:
        problem: why a call cannot be repeated, or None.
    """

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], recomputes: bool = False) -> None:
        reached = Reachable(skip_torch=recomputes).add(module)
        leaves = {key: leaf for key, leaf in reached.leaves().items() if key not in reached.norms}
        params = {} if recomputes else reached.parameters
        self._norms = reached.norms if recomputes else {}
        reached.add(arguments, "argument")
        self.problem = reached.problem
        self._arguments, self._contents = arguments, reached.contents
        # A repeated backward pass must not call the hooks of parameters.
        hooks = [param._backward_hooks for param in params.values() if param._backward_hooks]
        self._contents |= {id(each): (each, {}) for each in hooks}
        self._leaves = leaves if recomputes else reached.leaves()
        self._versions = {key: version_of(leaf) for key, leaf in self._leaves.items()}
        self._copies = _copy(self._leaves)
        self._params = [(param, param.detach().clone(), param._version) for param in params.values()]
        self._outside: dict[int, tuple[Any, Any]] = {}

    def add(self, values: Iterable[Any]) -> None:
        """Also put back objects and tensors, including those outside the module, which a call is about to change."""
        for value in values:
            container = value
            if not isinstance(value, (Tensor, *_CONTAINERS, CellType, type)):
                container = None if isinstance(value, nn.Module) else getattr(value, "__dict__", None)
            if container is not None and id(container) not in self._outside:
                self._outside[id(container)] = container, _read(container)

    def keep_changes(self) -> None:
        """Drop what has not changed since."""
        for key, version in self._versions.items():
            if version is not None and version == version_of(self._leaves[key]):
                del self._copies[key], self._leaves[key]
        kept = self._copies.keys() | self._norms.keys()
        self._contents = {
            key: (container, contents)
            for key, (container, contents) in self._contents.items()
            if not _is_same(_read(container), contents)
            or any(id(value) in kept or isinstance(value, tuple) for value in _values(contents))
        }

    @contextmanager
    def installed(self) -> Iterator[Any]:
        """Replace all contents by copies of the stored contents, and put everything back on exit.

        Yields:
            The arguments, with copies of their tensors.
        """
        changed = [(param, old) for param, old, version in self._params if param._version != version]
        now = [(container, _read(container)) for container, _ in (*self._contents.values(), *changed)]
        new = _copy(self._copies | self._norms)
        try:
            for container, contents in self._contents.values():
                _write(container, _replace(contents, new))
            for param, old in changed:
                _write(param, old)
            yield _replace(self._arguments, new)
        finally:
            for container, contents in (*self._outside.values(), *now):
                _write(container, contents)
