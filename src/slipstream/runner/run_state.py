"""Read-only properties of a Runner for hooks, loops and users."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from slipstream.config import Config
from slipstream.dataset.loading.loader import batch_size
from slipstream.dataset.loading.workers import end_workers
from slipstream.dist import get_rank, get_world_size, is_distributed
from slipstream.errors import ConfigError
from slipstream.model import unwrap_model
from slipstream.registry import LOOPS
from slipstream.runner.logs import config_text
from slipstream.runner.loops import BaseLoop, IterBasedTrainLoop
from slipstream.runner.user_config import add_loop_path

__all__ = ["RunState"]


class RunState:
    """Properties of a run, derived from its loops and model. Loops are built on first access."""

    cfg: Config
    model: nn.Module
    param_schedulers: list[Any] | dict[str, list[Any]] | None
    _loops: dict[str, Any]

    def _loop(self, mode: str) -> Any:
        """Return the loop of `mode`; the first call builds it."""
        loop = self._loops[mode]
        if isinstance(loop, Mapping):
            try:
                loop = self._loops[mode] = LOOPS.build(loop, default_args={"runner": self})
            except ConfigError as error:
                add_loop_path(error, mode)
                raise
        return loop

    def _end_workers(self) -> None:
        for loop in self._loops.values():
            if isinstance(loop, BaseLoop):
                end_workers(loop.dataloader)

    @property
    def train_loop(self) -> Any:
        """The training loop."""
        return self._loop("train")

    @property
    def val_loop(self) -> Any:
        """The validation loop, or None."""
        return self._loop("val")

    @property
    def test_loop(self) -> Any:
        """The test loop, or None."""
        return self._loop("test")

    @property
    def train_dataloader(self) -> Any:
        """The training loader."""
        return self.train_loop.dataloader

    @property
    def val_dataloader(self) -> Any:
        """The validation loader."""
        return self.val_loop.dataloader

    @property
    def test_dataloader(self) -> Any:
        """The test loader."""
        return self.test_loop.dataloader

    @property
    def by_epoch(self) -> bool:
        """Whether training counts epochs; True if there is no training loop."""
        loop = self._loops["train"]
        kind = loop["type"] if isinstance(loop, Mapping) else type(loop)
        return not (inspect.isclass(kind) and issubclass(kind, IterBasedTrainLoop))

    @property
    def _position(self) -> Any:
        """The training loop, or None if it is not built."""
        loop = self._loops["train"]
        return None if isinstance(loop, Mapping) else loop

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._position.epoch if self._position else 0

    @property
    def iter(self) -> int:
        """Finished training steps."""
        return self._position.iter if self._position else 0

    @property
    def inner_iter(self) -> int:
        """Finished steps of the current epoch."""
        return self._position.inner_iter if self._position else 0

    @property
    def max_epochs(self) -> int:
        """Total number of epochs; 1 if training counts iterations."""
        return self._position.max_epochs if self._position else 1

    @property
    def max_iters(self) -> int:
        """Total number of training steps."""
        return self._position.max_iters if self._position else 1

    @property
    def samples_per_step(self) -> int:
        """Samples per training step, summed over all processes."""
        return (batch_size(self.train_dataloader) or 1) * get_world_size()

    @property
    def all_param_schedulers(self) -> list[Any]:
        """All schedulers, of all optimizers."""
        schedulers = self.param_schedulers or []
        return (
            [s for part in schedulers.values() for s in part] if isinstance(schedulers, dict) else schedulers
        )

    @property
    def cfg_text(self) -> str:
        """The configuration as YAML text."""
        return config_text(self.cfg)

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        kinds = type(unwrap_model(self.model)).__mro__
        # For a sharded model, torch creates a class that derives from FSDPModule and the user's class.
        return next(kind.__name__ for kind in kinds if not hasattr(kind, "unshard"))

    @property
    def distributed(self) -> bool:
        """Whether there is a process group."""
        return is_distributed()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return get_world_size()
