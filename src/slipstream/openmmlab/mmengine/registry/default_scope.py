"""`DefaultScope`, MMEngine's interface to the default scope."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.registry import default_scope, init_default_scope
from slipstream.registry.registry import current_scope

__all__ = ["DefaultScope"]


class DefaultScope:
    """A named default scope. `get_instance` creates an instance and makes its scope the current default scope.

    Args:
        name: name of the instance; has no effect.
        scope_name: the scope.
    """

    def __init__(self, name: str, scope_name: str) -> None:
        self.instance_name = name
        self.scope_name = scope_name

    @classmethod
    def get_instance(cls, name: str, scope_name: str = "mmengine", **kwargs: Any) -> DefaultScope:
        """Make `scope_name` the default scope of the current context, and return it as a `DefaultScope`."""
        init_default_scope(scope_name)
        return cls(name, scope_name)

    @classmethod
    def get_current_instance(cls) -> DefaultScope | None:
        """Return the default scope of the current context, or None if there is none."""
        name = current_scope()
        return None if name is None else cls(name, name)

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether the current context has a default scope."""
        return current_scope() is not None

    @classmethod
    @contextmanager
    def overwrite_default_scope(cls, scope_name: str | None) -> Iterator[None]:
        """Use `scope_name` as the default scope inside the `with` block; None keeps the current scope."""
        with default_scope(current_scope() if scope_name is None else scope_name):
            yield
