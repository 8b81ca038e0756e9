"""Classes with named instances and a current instance."""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import Any, Self

from slipstream.errors import SlipstreamError

__all__ = ["ManagerMeta", "ManagerMixin"]

_lock = threading.RLock()


class ManagerMeta(type):
    """Metaclass that gives each class its own named instances; the constructor must accept a `name` argument."""

    def __init__(cls, *args: Any) -> None:
        cls._instance_dict: dict[str, Any] = {}
        assert "name" in inspect.getfullargspec(cls).args, (
            f"the constructor of {cls} must accept a 'name' argument"
        )
        super().__init__(*args)


class ManagerMixin(metaclass=ManagerMeta):
    """Base class for classes with named instances that can be looked up by name.

    Args:
        name: name of the instance; must not be empty.
    """

    def __init__(self, name: str = "", **kwargs: Any) -> None:
        assert isinstance(name, str), f"the name must be a string, not {type(name)}"
        assert name, "the name must not be empty"
        self._instance_name = name

    @classmethod
    def get_instance(cls, name: str, **kwargs: Any) -> Self:
        """Return the instance named `name`. The first call creates this instance with `kwargs`."""
        assert isinstance(name, str), f"the name must be a string, not {type(name)}"
        with _lock:
            if name not in cls._instance_dict:
                cls._instance_dict[name] = cls(name=name, **kwargs)
            elif kwargs:
                warnings.warn(
                    f"{cls.__name__} '{name}' already exists, so the other arguments are ignored",
                    stacklevel=2,
                )
            instance: Self = cls._instance_dict[name]
            return instance

    @classmethod
    def get_current_instance(cls) -> Any:
        """Return the most recently created instance.

        Raises:
            RuntimeError: if no instance exists.
        """
        with _lock:
            if not cls._instance_dict:
                raise NoInstanceError(
                    f"no {cls.__name__} has been created; call {cls.__name__}.get_instance(name=...) first"
                )
            return cls._instance_dict[next(reversed(cls._instance_dict))]

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether an instance named `name` exists."""
        return name in cls._instance_dict

    @property
    def instance_name(self) -> str:
        """The name of this instance."""
        return self._instance_name


class NoInstanceError(SlipstreamError, RuntimeError):
    """Raised if a class has no current instance."""
