"""The hooks of a run, sorted by priority."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook, get_priority
from slipstream.registry import HOOKS
from slipstream.typecheck import short_repr

__all__ = ["HookList"]


class HookList:
    """A list of hooks, sorted by priority and then by order of registration."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._methods: dict[str, list[Callable[..., None]]] = {}

    def register(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a `Hook`, or build one from a configuration (which may contain `priority`) and add it.

        Raises:
            ConfigError: if `hook` is neither a hook nor a valid configuration.
        """
        source = hook
        try:
            if isinstance(source, Mapping):
                priority = source.get("priority", priority)
                hook = HOOKS.build({key: value for key, value in source.items() if key != "priority"})
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"a hook must be a slipstream.hooks.Hook or a dict with a 'type', not {short_repr(hook)}"
                )
            if isinstance(source, Mapping):
                hook.source = source
            if priority is not None:
                hook.priority = priority
            order = _order(hook)
        except ConfigError as error:
            if isinstance(source, Mapping):
                # The identity of this dict is used to locate the error in the user config.
                error.source = source  # type: ignore[attr-defined]
            raise
        position = sum(_order(other) <= order for other in self._hooks)
        self._hooks.insert(position, hook)
        self._methods.clear()

    def methods_at(self, stage: str) -> list[Callable[..., None]]:
        """Return the methods that implement `stage`, in execution order."""
        if stage not in self._methods:
            self._methods[stage] = [
                method for hook in self._hooks if (method := hook.method_at(stage)) is not None
            ]
        return self._methods[stage]

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)


def _order(hook: Hook) -> tuple[bool, int]:
    return hook.runs_last, get_priority(hook.priority)
