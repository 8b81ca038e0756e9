"""Objects that are found by their names in a context (thread or task)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ClassVar, Self


class Named:
    """Base class of loggers and message hubs. A subclass defines `instances`, a variable made by `instances_by_name`.

    The variable maps names to the instances of this context; the last instance is the current one.
    """

    name: str
    instances: ClassVar[ContextVar[Mapping[str, Any]]]

    @contextmanager
    def as_current(self) -> Iterator[Self]:
        """Make `get_current_instance` return this object inside the `with` block."""
        token = self.instances.set(self._with_others())
        try:
            yield self
        finally:
            self.instances.reset(token)

    def make_current(self) -> None:
        """Make `get_current_instance` return this object in this context from now on."""
        self.instances.set(self._with_others())

    def _with_others(self) -> Mapping[str, Any]:
        others = {name: other for name, other in self.instances.get().items() if name != self.name}
        return {**others, self.name: self}


def instances_by_name(name: str) -> ContextVar[Mapping[str, Any]]:
    """Return a context variable that is initially an empty mapping."""
    return ContextVar(name, default=MappingProxyType({}))
