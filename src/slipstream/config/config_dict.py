"""`ConfigDict`, a dict with attribute access at every level."""

from __future__ import annotations

from typing import Any

from slipstream.errors import did_you_mean


class ConfigDict(dict[Any, Any]):
    """A dict with attribute access. Nested dicts, including those in lists and tuples, are converted to `ConfigDict`s.

    Because it is a subclass of dict, `**cfg`, `json.dumps(cfg)` and `isinstance(cfg, dict)` work. If a key has the name
    of a dict method, such as `items`, `cfg.items` is the method and `cfg["items"]` is the value.

    Raises:
        AttributeError: the attribute is not a key; the message suggests the nearest key.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, wrap(value))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        # copy and pickle look up special methods; computing suggestions would slow them down.
        keys = [] if name.startswith("__") else [key for key in self if isinstance(key, str)]
        hint = did_you_mean(name, keys)
        raise AttributeError(f"the configuration has no key '{name}'{hint}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the configuration has no key '{name}'", name=name, obj=self)
        del self[name]

    def __ior__(self, other: Any) -> ConfigDict:
        self.update(other)
        return self

    def __or__(self, other: Any) -> ConfigDict:
        result = self.copy()
        result.update(other)
        return result

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set keys, like `dict.update`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`, after setting it to `default` if the key is missing."""
        return super().setdefault(key, wrap(default))

    def copy(self) -> ConfigDict:
        """Return a shallow copy."""
        return type(self)(self)

    def __copy__(self) -> ConfigDict:
        return self.copy()

    def to_dict(self) -> dict[Any, Any]:
        """Return the values as new built-in dicts, lists and tuples."""
        return {key: unwrap(value) for key, value in self.items()}


def wrap(value: Any) -> Any:
    """Return `value` with every dict in it converted to a `ConfigDict`."""
    if isinstance(value, ConfigDict):
        return value
    if isinstance(value, dict):
        return ConfigDict(value)
    # Check the exact type, because a named tuple cannot be constructed from an iterable.
    if type(value) in (list, tuple):
        return type(value)(wrap(item) for item in value)
    return value


def unwrap(value: Any) -> Any:
    """Return `value` with every dict in it converted to a built-in dict."""
    if isinstance(value, dict):
        return {key: unwrap(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unwrap(item) for item in value)
    return value
