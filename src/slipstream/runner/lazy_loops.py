"""A run's training, validation and test loops, each of which is built on first access."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.registry import LOOPS
from slipstream.runner.loops import BaseLoop
from slipstream.runner.user_config import LOOP_ARGUMENTS, add_loop_path, loop_options

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

__all__ = ["LazyLoops"]


class LazyLoops:
    """The loops that are defined by a Runner's arguments.

    Args:
        runner: the Runner that owns the loops.
        arguments: the Runner's arguments.

    Raises:
        ConfigError: see `loop_options`.
    """

    def __init__(self, runner: Runner, arguments: Mapping[str, Any]) -> None:
        self._runner = runner
        self._loops: dict[str, Any] = {mode: loop_options(mode, arguments) for mode in LOOP_ARGUMENTS}

    def __contains__(self, mode: str) -> bool:
        return self._loops[mode] is not None

    def require(self, mode: str) -> None:
        """Check that the arguments define the loop for `mode`.

        Raises:
            ConfigError: the arguments do not define the loop.
        """
        if mode not in self:
            *others, last = LOOP_ARGUMENTS[mode]
            call = "training" if mode == "train" else f"{mode}()"
            raise ConfigError(f"{call} requires {', '.join(others)} and {last}", "Runner")

    def get(self, mode: str) -> Any:
        """Return the loop for `mode`, or None if the arguments do not define the loop. The first call builds it."""
        loop = self._loops[mode]
        if isinstance(loop, Mapping):
            try:
                loop = self._loops[mode] = LOOPS.build(loop, default_args={"runner": self._runner})
            except ConfigError as error:
                add_loop_path(error, mode)
                raise
        return loop

    def get_if_built(self, mode: str) -> Any:
        """Return the loop for `mode`, or None if it is not defined or has not been built."""
        loop = self._loops[mode]
        return None if isinstance(loop, Mapping) else loop

    @property
    def by_epoch(self) -> bool:
        """Whether training is epoch-based; True if there is no training loop."""
        loop = self._loops["train"]
        kind = loop["type"] if isinstance(loop, Mapping) else type(loop)
        counts_epochs: bool = getattr(kind, "counts_epochs", True)
        return counts_epochs

    def count(self, name: str, default: int) -> int:
        """Return a counter of the training loop, such as `iter`; `default` if the loop has not been built."""
        loop = self.get_if_built("train")
        count: int = default if loop is None else getattr(loop, name)
        return count

    def end_workers(self) -> None:
        """Stop the worker processes of all loaders."""
        for loop in self._loops.values():
            if isinstance(loop, BaseLoop):
                loop.end_loading()
