"""A dict of named optimizers, for models that override `train_step`."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn

from slipstream.errors import ConfigError, ModelError
from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = ["OptimWrapperDict"]


class OptimWrapperDict(OptimWrapper):
    """A dict of `OptimWrapper` objects; the model's `train_step` accesses them by name (for example in GANs)."""

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ConfigError(f"must be an OptimWrapper, not {type(wrapper).__name__}", name)
            wrapper._key = name
        self.optim_wrappers = optim_wrappers
        self.grad_norm, self.logs = None, {}
        self.parts = []
        self.phases = None

    def _raise(self, call: str) -> NoReturn:
        names = ", ".join(self.optim_wrappers)
        raise ModelError(
            f"there are several optimizers ({names}); override train_step(data, optim_wrapper) in the model, and call "
            f"optim_wrapper[name].{call} there"
        )

    def update_params(self, loss: Tensor, **kwargs: Any) -> None:
        """Raise ModelError, because the model must select the optimizer."""
        self._raise("update_params(loss)")

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Raise ModelError, like `update_params`."""
        self._raise("backward(loss)")

    def step(self, **kwargs: Any) -> None:
        """Raise ModelError, like `update_params`."""
        self._raise("step()")

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Raise ModelError, because each wrapper has its own context manager."""
        self._raise("optim_context(model)")

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of all optimizers."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Do nothing, because the model determines how often each optimizer steps."""

    @property
    def accumulative_counts(self) -> int:
        """Always 1, because each wrapper has its own number of batches per step."""
        return 1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for wrapper in self.values() for group in wrapper.param_groups]

    def get_lr(self) -> dict[str, list[float]]:
        """Return `{"name.lr": [...]}` with an entry for each wrapper."""
        return {f"{name}.lr": wrapper.get_lr()["lr"] for name, wrapper in self.items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return `{"name.momentum": [...]}` with an entry for each wrapper."""
        return {f"{name}.momentum": wrapper.get_momentum()["momentum"] for name, wrapper in self.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return `{name: state}`."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each wrapper by name."""
        if state_dict.keys() != self.optim_wrappers.keys():
            raise ConfigError(
                f"the optimizers are {sorted(self.keys())}, but the state contains {sorted(state_dict)}; load the "
                "state of a run with the same optimizers"
            )
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])

    def __getitem__(self, name: str) -> OptimWrapper:
        return self.optim_wrappers[name]

    def __contains__(self, name: str) -> bool:
        return name in self.optim_wrappers

    def __len__(self) -> int:
        return len(self.optim_wrappers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.optim_wrappers)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self.optim_wrappers.keys()

    def values(self) -> ValuesView[OptimWrapper]:
        """Return the wrappers."""
        return self.optim_wrappers.values()

    def items(self) -> ItemsView[str, OptimWrapper]:
        """Return the (name, wrapper) pairs."""
        return self.optim_wrappers.items()

    def __repr__(self) -> str:
        return f"OptimWrapperDict({', '.join(f'{k}={v!r}' for k, v in self.items())})"
