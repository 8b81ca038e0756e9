"""The storage backend interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["BaseStorageBackend"]


class BaseStorageBackend(ABC):
    """Base class for storage backends."""

    @property
    def name(self) -> str:
        """The class name."""
        return type(self).__name__

    @abstractmethod
    def get(self, filepath: Any) -> Any:
        """Return the contents of a file as bytes."""

    @abstractmethod
    def get_text(self, filepath: Any, encoding: str = "utf-8") -> str:
        """Return the contents of a file as a string."""
