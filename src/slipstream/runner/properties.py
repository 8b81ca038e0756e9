"""The read-only properties of a Runner."""

from __future__ import annotations

from typing import Any

from torch import nn

from slipstream.config import Config
from slipstream.dist import get_rank, get_world_size, is_distributed
from slipstream.model import unwrap_model
from slipstream.optim.scheduler import INF
from slipstream.redaction import redact
from slipstream.runner.interface import ModelInterface
from slipstream.runner.lazy_loops import LazyLoops
from slipstream.runner.logs import config_text

__all__ = ["RunnerProperties"]


class RunnerProperties:
    """Properties of a Runner: its progress, its loops and its configuration. The Runner sets the attributes below."""

    cfg: Config
    loops: LazyLoops
    model: nn.Module
    param_schedulers: list[Any] | dict[str, list[Any]] | None
    _interface: ModelInterface
    _user_cfg: dict[str, Any]

    @property
    def interface(self) -> ModelInterface:
        """The interface through which the Runner calls `model`, which a hook may have replaced."""
        self._interface.model = self.model
        return self._interface

    @property
    def train_loop(self) -> Any:
        """The training loop."""
        return self.loops.get("train")

    @property
    def val_loop(self) -> Any:
        """The validation loop, or None."""
        return self.loops.get("val")

    @property
    def test_loop(self) -> Any:
        """The test loop, or None."""
        return self.loops.get("test")

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
        """Whether training is epoch-based; True if there is no training loop."""
        return self.loops.by_epoch

    @property
    def _position(self) -> Any:
        """The training loop, or None if it has not been built."""
        return self.loops.built("train")

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._position.epoch if self._position else 0

    @property
    def iter(self) -> int:
        """Number of finished training steps."""
        return self._position.iter if self._position else 0

    @property
    def inner_iter(self) -> int:
        """Number of finished steps in the current epoch."""
        return self._position.inner_iter if self._position else 0

    @property
    def max_epochs(self) -> int:
        """Total number of epochs; 1 if training is iteration-based."""
        return self._position.max_epochs if self._position else 1

    @property
    def max_iters(self) -> int:
        """Total number of training steps, which is very large if it is not known (see `knows_length`)."""
        return self._position.max_iters if self._position else 1

    @property
    def knows_length(self) -> bool:
        """Whether the total number of training steps is known; False for epochs over a loader without a length."""
        return self.max_iters < INF

    @property
    def samples_per_step(self) -> int:
        """Number of samples per training step, summed over all processes."""
        samples: int = self.train_loop.samples_per_step
        return samples

    @property
    def all_param_schedulers(self) -> list[Any]:
        """The schedulers of all optimizers."""
        schedulers = self.param_schedulers or []
        return (
            [s for part in schedulers.values() for s in part] if isinstance(schedulers, dict) else schedulers
        )

    @property
    def cfg_text(self) -> str:
        """The configuration as YAML text."""
        return config_text(self.cfg)

    @property
    def user_config(self) -> dict[str, Any]:
        """The arguments and the configuration of this Runner, without secrets; values may be objects."""
        config: dict[str, Any] = redact(dict(self._user_cfg))
        return config

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
