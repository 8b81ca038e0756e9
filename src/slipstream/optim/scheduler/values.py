"""Read and write an option of every parameter group, synchronizing with the device as rarely as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError, did_you_mean
from slipstream.typecheck import matches

__all__ = ["BetaValues", "ParamValues"]


class ParamValues:
    """One option (`lr`, `momentum`, `weight_decay`) of an optimizer's parameter groups, as floats.

    The option may be a 0-dim tensor, so that a compiled step is not recompiled when the value changes. The tensor is
    updated in place, and its value is cached on the host. Reading the option synchronizes with the device only the
    first time, and after other code has changed the tensor. The cache is an attribute of the optimizer, so all of the
    optimizer's schedulers share it.

    Args:
        optimizer: an object with `param_groups`; for an `OptimWrapper`, the cache is stored on its inner optimizer.
        name: key of the option.

    Raises:
        ConfigError: a group does not have the option, or its value is not a number.
    """

    def __init__(self, optimizer: Any, name: str) -> None:
        if not getattr(optimizer, "param_groups", None):
            raise ConfigError(f"optimizer must have param_groups, but {type(optimizer).__name__} has none")
        self.optimizer = optimizer
        self.name = name
        owner = getattr(optimizer, "optimizer", optimizer)
        # Each entry keeps its tensor alive, so that no other tensor can have the same id.
        self._cache: dict[int, tuple[Tensor, int, float]] = vars(owner).setdefault("_values_on_host", {})
        for index, group in enumerate(self.groups):
            self._check(index, group)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's current parameter groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def read(self) -> list[float]:
        """Return the value of every group."""
        return [self._float(self._get(group)) for group in self.groups]

    def write(self, values: Sequence[float]) -> None:
        """Set the value of every group."""
        for group, value in zip(self.groups, values, strict=True):
            current = self._get(group)
            if not isinstance(current, Tensor):
                self._set(group, value)
            elif self._float(current) != value:
                current.fill_(value)
                self._store(current, value)

    def restore(self, values: Sequence[float]) -> None:
        """Cache each value for its tensor if the value, rounded to the tensor's dtype, equals the tensor.

        Without the cached value, a resumed run would continue from a learning rate that has been rounded to float32.
        """
        for group, value in zip(self.groups, values, strict=True):
            current = self._get(group)
            if (
                isinstance(current, Tensor)
                and torch.tensor(value, dtype=current.dtype).item() == current.item()
            ):
                self._store(current, value)

    def initial(self, resumed: bool) -> list[float]:
        """Return the initial value of every group, and store the value in groups that do not contain it yet.

        Raises:
            ConfigError: `resumed` is True, but a group does not contain its initial value.
        """
        key = f"initial_{self.name}"
        for index, (group, value) in enumerate(zip(self.groups, self.read(), strict=True)):
            if resumed and key not in group:
                raise ConfigError(
                    f"last_step is set to resume a run, but param_groups[{index}] has no '{key}'; "
                    "load the optimizer state first, or set last_step to -1"
                )
            group.setdefault(key, value)
        return [float(group[key]) for group in self.groups]

    def _get(self, group: dict[str, Any]) -> Any:
        return group[self.name]

    def _set(self, group: dict[str, Any], value: float) -> None:
        group[self.name] = value

    def _check(self, index: int, group: dict[str, Any]) -> None:
        if self.name not in group:
            options = [key for key in group if key != "params"]
            raise ConfigError(
                f"param_groups[{index}] has no option '{self.name}' (param_name); its options are {sorted(options)}"
                f"{did_you_mean(self.name, options)}"
            )
        value = self._get(group)
        if not matches(value, float) and not (isinstance(value, Tensor) and value.ndim == 0):
            raise ConfigError(f"the '{self.name}' option (param_name) must be a number, not {value!r}")

    def _store(self, tensor: Tensor, value: float) -> None:
        self._cache[id(tensor)] = (tensor, tensor._version, value)

    def _float(self, value: Any) -> float:
        if not isinstance(value, Tensor):
            return float(value)
        cached = self._cache.get(id(value))
        if cached is None or cached[1] != value._version:
            self._store(value, value.item())
            cached = self._cache[id(value)]
        return cached[2]


class BetaValues(ParamValues):
    """The first beta of Adam optimizers, which is also stored in the parameter groups as `momentum`."""

    def __init__(self, optimizer: Any) -> None:
        for group in getattr(optimizer, "param_groups", []):
            group.setdefault("momentum", 0.0)
        super().__init__(optimizer, "momentum")
        self._mirror()

    def write(self, values: Sequence[float]) -> None:
        """Set the first beta of every group."""
        super().write(values)
        self._mirror()

    def _get(self, group: dict[str, Any]) -> Any:
        return group["betas"][0]

    def _set(self, group: dict[str, Any], value: float) -> None:
        group["betas"] = (value, *group["betas"][1:])

    def _mirror(self) -> None:
        for group, value in zip(self.groups, self.read(), strict=True):
            group["momentum"] = value
