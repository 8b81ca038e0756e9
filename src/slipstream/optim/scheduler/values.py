"""Read and write one option of every parameter group without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError, did_you_mean
from slipstream.typecheck import matches

__all__ = ["BetaValues", "ParamValues"]


class ParamValues:
    """One option (`lr`, `momentum`, `weight_decay`) of all parameter groups of an optimizer, as floats.

    Where the option is a 0-dim tensor, so that a compiled step reads it without recompiling, it is
    filled in place, and what was written is remembered beside it: reading it back asks the device only
    if somebody else has changed the tensor since. The memory hangs on the optimizer, so all schedulers
    of one optimizer share it.

    Args:
        optimizer: anything with `param_groups`; of an `OptimWrapper`, the optimizer inside holds the memory.
        name: the option's key.

    Raises:
        ConfigError: a group has no such option, or it is not a number.
    """

    def __init__(self, optimizer: Any, name: str) -> None:
        if not getattr(optimizer, "param_groups", None):
            raise ConfigError(f"optimizer must have param_groups, not be {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.name = name
        owner = getattr(optimizer, "optimizer", optimizer)
        # The entry holds the tensor too, so its id cannot pass to another tensor.
        self._known: dict[int, tuple[Tensor, int, float]] = vars(owner).setdefault("_values_on_host", {})
        for index, group in enumerate(self.groups):
            self._check(index, group)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups as they are now."""
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
                self._remember(current, value)

    def restore(self, values: Sequence[float]) -> None:
        """Take `values` for what the tensors hold, where they agree after rounding to the tensor's dtype.

        A learning rate saved as float32 would otherwise continue, after resuming, from its rounded value.
        """
        for group, value in zip(self.groups, values, strict=True):
            current = self._get(group)
            if (
                isinstance(current, Tensor)
                and torch.tensor(value, dtype=current.dtype).item() == current.item()
            ):
                self._remember(current, value)

    def initial(self, resumed: bool) -> list[float]:
        """Return the value that every group started with, and record it in the groups unless they have it.

        Raises:
            ConfigError: `resumed`, but a group does not know its initial value.
        """
        key = f"initial_{self.name}"
        for index, (group, value) in enumerate(zip(self.groups, self.read(), strict=True)):
            if resumed and key not in group:
                raise ConfigError(
                    f"last_step says that the run is resumed, but param_groups[{index}] has no '{key}': "
                    "load the optimizer's state first, or leave last_step at -1"
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
                f"param_name '{self.name}' is no option of param_groups[{index}], which has {sorted(options)}"
                f"{did_you_mean(self.name, options)}"
            )
        value = self._get(group)
        if not matches(value, float) and not (isinstance(value, Tensor) and value.ndim == 0):
            raise ConfigError(f"param_name '{self.name}' must name a number, but its value is {value!r}")

    def _remember(self, tensor: Tensor, value: float) -> None:
        self._known[id(tensor)] = (tensor, tensor._version, value)

    def _float(self, value: Any) -> float:
        if not isinstance(value, Tensor):
            return float(value)
        known = self._known.get(id(value))
        if known is None or known[1] != value._version:
            self._remember(value, value.item())
            known = self._known[id(value)]
        return known[2]


class BetaValues(ParamValues):
    """The first beta of the Adam family, mirrored in the groups as `momentum`."""

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
