"""`LazyConfigDict`, a `ConfigDict` that imports an object only when the object is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, ClassVar

from slipstream.config.config_dict import ConfigDict
from slipstream.config.merge import DELETE
from slipstream.openmmlab.mmengine.config.lazy import LazyAttr, LazyObject, lazy_path

__all__ = ["FileDict", "LazyConfigDict", "as_plain", "as_written", "contains_lazy"]


class LazyConfigDict(ConfigDict):
    """A `ConfigDict` that can contain lazily imported objects. Reading such a value imports the object. Copying the
    dict or writing it to a file does not import the object.

    As in MMEngine, objects in a list are not imported when the list is read, and `update` merges dicts recursively.
    """

    _imports: ClassVar[bool] = True

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self, key, self._wrap(value))

    def __getitem__(self, key: Any) -> Any:
        return self._read(dict.__getitem__(self, key))

    def __iter__(self) -> Iterator[Any]:
        # If a dict subclass does not define `__iter__`, `dict(cfg)` and `**cfg` do not call `__getitem__`.
        return iter(self.keys())

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if the key is missing."""
        return self._read(dict.get(self, key, default))

    def pop(self, key: Any, default: Any = None) -> Any:
        """Remove `key` and return its value; if the key is missing, return `default`."""
        return self._read(dict.pop(self, key, default))

    def items(self) -> Any:
        """Return a list of (key, value) pairs."""
        return [(key, self._read(value)) for key, value in dict.items(self)]

    def values(self) -> Any:
        """Return a list of the values."""
        return [self._read(value) for value in dict.values(self)]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`; if the key is missing, set its value to `default` first."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set values. A new dict is merged into an existing dict, or replaces it if the new dict has `_delete_=True`.

        In contrast, MMEngine stores `_delete_` as a key, so building an object from the dict raises an error.
        """
        new = dict(_stored_items(args[0]) if args and isinstance(args[0], dict) else dict(*args)) | kwargs
        if self and new.pop(DELETE, False):
            self.clear()
        for key, value in new.items():
            old = dict.get(self, key)
            if isinstance(old, LazyConfigDict) and isinstance(value, dict):
                stored = dict(_stored_items(value))
                if stored.pop(DELETE, False):
                    old.clear()
                old.update(stored)
            else:
                self[key] = value

    def merge(self, other: Mapping[str, Any]) -> None:
        """Merge another dict into this dict. A nested dict with `_delete_=True` replaces the existing value."""
        merged = _merge_values(as_plain(deepcopy(other)), as_plain(self))
        self.clear()
        for key, value in merged.items():
            self[key] = value

    def to_dict(self) -> dict[Any, Any]:
        """Return the values as new built-in containers, with imported objects replaced by their import strings."""
        values: dict[Any, Any] = as_written(self)
        return values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self.to_dict() == as_written(other)

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyConfigDict:
        new = type(self)()
        memo[id(self)] = new
        for key, value in dict.items(self):
            dict.__setitem__(new, deepcopy(key, memo), deepcopy(value, memo))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(_stored_items(self)),)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def _read(self, value: Any) -> Any:
        return value.build() if self._imports and isinstance(value, LazyObject | LazyAttr) else value

    @classmethod
    def _wrap(cls, value: Any) -> Any:
        if type(value) is cls:
            return value
        if isinstance(value, dict):
            return cls(value)
        if type(value) in (list, tuple):
            return type(value)(cls._wrap(item) for item in value)
        return value


class FileDict(LazyConfigDict):
    """A dict from a base file, used while a configuration is loaded; reading a value does not import the object."""

    _imports = False


def as_plain(value: Any) -> Any:
    """Return `value` with dicts converted to built-in dicts, without importing objects."""
    return _convert_lazy(value, lambda lazy: lazy)


def as_written(value: Any) -> Any:
    """Return `value` with dicts converted to built-in dicts, and imported objects to their import strings."""
    return _convert_lazy(value, lazy_path)


def contains_lazy(value: Any) -> bool:
    """Return whether `value` contains an object that has not been imported yet."""
    if isinstance(value, dict):
        return any(contains_lazy(item) for item in dict.values(value))
    if isinstance(value, list | tuple):
        return any(contains_lazy(item) for item in value)
    return isinstance(value, LazyObject | LazyAttr)


def _convert_lazy(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _convert_lazy(item, convert) for key, item in dict.items(value)}
    if type(value) in (list, tuple):
        return type(value)(_convert_lazy(item, convert) for item in value)
    return convert(value) if isinstance(value, LazyObject | LazyAttr) else value


def _stored_items(values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Return the keys and values without importing objects."""
    return iter(dict.items(values))


_MISSING = object()


def _merge_values(new: Any, old: Any) -> Any:
    if not isinstance(new, dict):
        return old if new is _MISSING else new
    if not isinstance(old, dict):
        return {key: value for key, value in new.items() if key != DELETE}
    if new.get(DELETE):
        old = {}
    keys = dict.fromkeys([*old, *new])
    return {
        key: _merge_values(new.get(key, _MISSING), old.get(key, _MISSING)) for key in keys if key != DELETE
    }
