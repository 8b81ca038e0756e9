"""Averages of a model's weights over training: EMA, EMA with an annealed momentum, SWA."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.dist.sharding import local, mesh_of
from slipstream.errors import ConfigError
from slipstream.registry import MODELS

__all__ = [
    "BaseAveragedModel",
    "ExponentialMovingAverage",
    "MomentumAnnealingEMA",
    "StochasticWeightAverage",
]


class BaseAveragedModel(nn.Module):
    """A copy of a model whose weights are averages of the model's weights.

    Subclasses define `weight(step)`, the share of the current weights in update number `step`. All tensors
    are averaged by one fused `lerp`, and the step count lives on the host: nothing waits for the device.

    Args:
        model: the model to average (unwrapped).
        interval: average every that many updates.
        device: where the averages live; by default where the model is.
        update_buffers: average floating-point buffers too; otherwise, and for integer buffers, they are
            the model's own (BatchNorm statistics are averages already).
    """

    def __init__(
        self,
        model: nn.Module,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__()
        if interval < 1:
            raise ConfigError(f"must be at least 1, not {interval}", "interval")
        self.module = (_copy(model) if mesh_of(model) is None else _twin(model)).requires_grad_(False)
        if device is not None:
            self.module.to(device)
        self.device = device
        self.interval = interval
        self.update_buffers = update_buffers
        self.steps = 0
        self._known: tuple[nn.Module, list[Tensor], list[Tensor]] | None = None

    def weight(self, step: int) -> float:
        """Return the share of the model's current weights in the average."""
        raise NotImplementedError

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the model's current weights into the average; the first call copies them."""
        if self.steps % self.interval == 0:
            average, current = self._pairs(model)
            if self.device is not None:
                current = [tensor.to(self.device) for tensor in current]
            if self.steps == 0:
                torch._foreach_copy_(average, current)
            else:
                torch._foreach_lerp_(average, current, self.weight(self.steps))
        self.steps += 1

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Copy those buffers of the model that are not averaged, so that this copy can be used or saved."""
        averaged = {id(t) for t in self._averaged(self.module)}
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            if id(mine) not in averaged:
                mine.copy_(theirs)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange averages and current weights; on one device, without copying them unless they are sharded."""
        in_place = mesh_of(model) is not None  # torch gathers sharded weights from the storages it knows
        for mine, theirs in zip(*self._pairs(model), strict=True):
            if in_place:
                kept = theirs.clone()
                theirs.copy_(mine)
                mine.copy_(kept)
            else:
                mine.data, theirs.data = theirs.data.to(mine.device), mine.data.to(theirs.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model."""
        return self.module(*args, **kwargs)

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return averages and weights in the same order, found once for a model."""
        if self._known is None or self._known[0] is not model:
            # Not an attribute of a Module, which would make the model a part of this one.
            self._known = (model, self._averaged(self.module), self._averaged(model))
        return self._known[1], self._known[2]

    def _averaged(self, model: nn.Module) -> list[Tensor]:
        tensors: list[Tensor] = [local(param) for param in model.parameters()]
        if self.update_buffers:
            tensors += [b for b in model.buffers() if b.is_floating_point()]
        return tensors

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.steps = int(state_dict.pop(prefix + "steps", self.steps))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy whose parts are not wrapped for several processes: an average is not trained."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            memo[id(module)] = copy.deepcopy(module.module, memo)
    return copy.deepcopy(model, memo)


def _twin(model: nn.Module, made: dict[Any, Any] | None = None) -> nn.Module:
    """Return copies of all tensors of a sharded model, which torch refuses to copy, by their names; it cannot run."""
    made = {None: None} if made is None else made
    twin = made[model] = nn.Module()
    for name, param in model._parameters.items():
        if param is not None and param not in made:
            made[param] = nn.Parameter(param.detach().clone(), requires_grad=False)
        twin.register_parameter(name, made[param])
    for name, buffer in model._buffers.items():
        if buffer is not None and buffer not in made:
            made[buffer] = buffer.clone()
        twin.register_buffer(name, made[buffer], name not in model._non_persistent_buffers_set)
    for name, child in model._modules.items():
        if child is not None and child not in made:
            _twin(child, made)
        twin.register_module(name, made[child])
    return twin


@MODELS.register_module()
class ExponentialMovingAverage(BaseAveragedModel):
    """average = (1 - momentum) * average + momentum * weights, with a small constant `momentum`."""

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__(model, interval, device, update_buffers)
        if not 0 < momentum < 1:
            raise ConfigError(
                f"must lie between 0 and 1, not {momentum}; it is the share of the new weights, 1 - decay",
                "momentum",
            )
        self.momentum = momentum

    def weight(self, step: int) -> float:
        """Return the constant momentum."""
        return self.momentum


@MODELS.register_module()
class MomentumAnnealingEMA(ExponentialMovingAverage):
    """An EMA whose momentum falls as max(momentum, gamma / (gamma + step)), so that it forgets the start."""

    def __init__(self, model: nn.Module, momentum: float = 0.0002, gamma: int = 100, **kwargs: Any) -> None:
        super().__init__(model, momentum, **kwargs)
        if gamma < 1:
            raise ConfigError(f"must be at least 1, not {gamma}", "gamma")
        self.gamma = gamma

    def weight(self, step: int) -> float:
        """Return the annealed momentum."""
        return max(self.momentum, self.gamma / (self.gamma + step))


@MODELS.register_module()
class StochasticWeightAverage(BaseAveragedModel):
    """The plain mean of all weights seen (Izmailov et al. 2018, arXiv 1803.05407)."""

    def weight(self, step: int) -> float:
        """Return one over the number of weights averaged so far, this one included."""
        return 1.0 / (step // self.interval + 1)
