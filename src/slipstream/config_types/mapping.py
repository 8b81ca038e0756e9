"""`AnyMapping`: a mapping that type checkers accept instead of a `TypedDict`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["AnyMapping", "ValidOption"]

MYPY = False  # mypy treats this name as True


class ValidOption:
    """The type that mypy reports as expected for a dict with an unknown key or an invalid value."""


class AnyMapping(Protocol):
    """A mapping with string keys and values of type `Any`."""

    def keys(self) -> Iterable[str]:
        """Return the keys."""
        ...

    if MYPY:
        # `Any` is compatible with `ValidOption`; the type that mypy infers for a value in a dict literal is not.
        def __getitem__(self, key: str, /) -> ValidOption: ...  # pyright: ignore[reportRedeclaration]

    else:
        # With `ValidOption`, pyright would reject every `dict(...)`: it does not match such calls against a TypedDict.
        def __getitem__(self, key: str, /) -> Any: ...
