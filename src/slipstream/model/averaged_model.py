"""Averages of a model's weights over training: EMA, EMA with an annealed momentum, SWA."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.dist import all_reduce_params
from slipstream.dist.sharding import local, mesh_of
from slipstream.errors import ConfigError, did_you_mean
from slipstream.registry import MODELS

__all__ = [
    "BaseAveragedModel",
    "DecaySchedule",
    "ExponentialMovingAverage",
    "MomentumAnnealingEMA",
    "ScheduledEMA",
    "StochasticWeightAverage",
]


class BaseAveragedModel(nn.Module):
    """A copy of a model whose weights are averages of the model's weights.

    Subclasses define `weight(step)`, the share of the current weights in update number `step`; the first
    update copies the weights. All tensors are averaged by one fused `lerp`, and the step count lives on the
    host: nothing waits for the device.

    Args:
        model: the model to average (unwrapped).
        interval: average every that many updates.
        device: where the averages live; by default where the model is.
        update_buffers: average the buffers of `state_dict`, too, that hold finite floating-point numbers; all
            others are the model's own (BatchNorm statistics are averages already).
    """

    every_batch: bool = True
    """Whether a batch that only adds to an accumulation window counts as an update."""
    total_steps: int | None = None
    """The updates of the whole training, told by whoever drives it."""

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
        self._moving = _moving_buffers(self.module) if update_buffers else ()
        self._known: tuple[nn.Module, _Averaged, _Averaged] | None = None

    def weight(self, step: int) -> float:
        """Return the share of the model's current weights in the average."""
        raise NotImplementedError

    def share(self) -> float:
        """Count an update; return the share of the current weights in it: 1 copies them, 0 changes nothing."""
        step = self.steps
        self.steps += 1
        if step % self.interval:
            return 0.0
        return self.weight(step) if step else 1.0

    def mean_update(self) -> float:
        """Return the mean number, from 1, of the updates that the average consists of after `total_steps`.

        Each counts by its share in the end; a plain mean of all weights gives the middle of the training.
        """
        assert self.total_steps is not None, "whoever drives it tells"
        last = self.weight(self.total_steps - 1)
        if self.total_steps * last > 4 * self.interval:
            # Shares fall, so that the mean is no further from the end than that of the last share throughout.
            return self.total_steps - self.interval / last
        mean = 1.0
        for step in range(self.interval, self.total_steps, self.interval):
            mean += self.weight(step) * (step + 1 - mean)
        return mean

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the model's current weights into the average; the first call copies them."""
        share = self.share()
        if not share:
            return
        average, current = self.pairs(model)
        if self.device is not None:
            current = [tensor.to(self.device) for tensor in current]
        torch._foreach_lerp_(average, current, share)

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Copy those buffers of the model that are not averaged, so that this copy can be used or saved."""
        averaged = {id(t) for t in self._averaged(self.module).tensors()}
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            if id(mine) not in averaged:
                mine.copy_(theirs)

    @torch.no_grad()
    def agree_on_buffers(self) -> None:
        """Give every rank the mean of all ranks' averaged buffers: each has seen its own part of the batches."""
        all_reduce_params(self._buffers_of(self.module), op="mean")

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange averages and current weights, and put both back where they were by a second call.

        On one device the storages change places, and nothing is copied; between devices, and where the model is
        sharded, the values do.
        """
        # torch gathers sharded weights from the storages it knows; a captured graph finds weights by their address.
        in_place = mesh_of(model) is not None
        for mine, theirs in zip(*self.pairs(model), strict=True):
            if in_place or mine.device != theirs.device:
                kept = theirs.clone()
                theirs.copy_(mine)
                mine.copy_(kept)
            else:
                mine.data, theirs.data = theirs.data, mine.data

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model."""
        return self.module(*args, **kwargs)

    def pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return averages and weights in the same order: the very tensors (of a sharded model, its local parts)."""
        if self._known is None or self._known[0] is not model:
            # Not an attribute of a Module, which would make the model a part of this one.
            self._known = (model, self._averaged(self.module), self._averaged(model))
        return self._known[1].tensors(), self._known[2].tensors()

    def _averaged(self, model: nn.Module) -> _Averaged:
        buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        places = {id(module._buffers[name]): (module, name) for module, name in buffers}
        moving = [places[id(buffer)] for buffer in self._buffers_of(model)]
        return _Averaged([local(param) for param in model.parameters()], moving)

    def _buffers_of(self, model: nn.Module) -> list[Tensor]:
        """Return those buffers that are averaged."""
        buffers = list(model.buffers())
        return [buffers[index] for index in self._moving]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.steps = int(state_dict.pop(prefix + "steps", self.steps))
        super()._load_from_state_dict(state_dict, prefix, *args)


@dataclass(frozen=True)
class _Averaged:
    """What is averaged of a model."""

    params: list[Tensor]
    buffers: list[tuple[nn.Module, str]]
    """Owner and name: a forward may assign a buffer, which is another tensor then."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors as they are now."""
        return [*self.params, *(getattr(module, name) for module, name in self.buffers)]


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy whose parts are not wrapped for several processes: an average is not trained."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            memo[id(module)] = copy.deepcopy(module.module, memo)
    return copy.deepcopy(model, memo)


def _moving_buffers(model: nn.Module) -> list[int]:
    """Return the places, among all buffers, of those that can be averaged and are saved.

    The mean of an infinite value (of an attention mask, or a minimum that has seen nothing) with itself is NaN.
    """
    saved = model.state_dict()
    return [
        index
        for index, (name, buffer) in enumerate(model.named_buffers())
        if name in saved and buffer.is_floating_point() and bool(buffer.isfinite().all())
    ]


def _check_precision(model: nn.Module, share: float, word: str) -> None:
    """Refuse weights of so few digits that an average would stand still, and nobody would notice."""
    for name, param in model.named_parameters():
        if param.is_floating_point() and torch.finfo(param.dtype).eps > share:
            raise ConfigError(
                f"the average of '{name}' would stand still: a share of {share:g} is lost in {param.dtype}. Keep "
                "the weights in float32 (autocast computes in lower precision all the same), or take larger shares",
                word,
            )


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
        _check_precision(model, momentum, "momentum")
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


@dataclass(frozen=True)
class DecaySchedule:
    """How the decay of an EMA grows, in SuperGradients' words (`ema_params`)."""

    decay: float = 0.9999
    """Its largest value, between 0 and 1: the share of the old average that is kept."""
    decay_type: str = "exp"
    """One of `types`."""
    beta: float | None = None
    """Of `exp` alone: how early it comes near its largest value; None is 15."""

    types: ClassVar[tuple[str, ...]] = ("constant", "threshold", "exp")

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ConfigError(
                f"must lie between 0 and 1, not {self.decay}; it is the share of the old average that is kept",
                "decay",
            )
        if self.decay_type not in self.types:
            hint = did_you_mean(self.decay_type, self.types)
            raise ConfigError(f"must be one of {self.types}, not {self.decay_type!r}{hint}", "decay_type")
        if self.beta is None:
            return
        if self.decay_type != "exp":
            raise ConfigError(f"belongs to 'exp', not to '{self.decay_type}': leave it out", "beta")
        if self.beta <= 0:
            raise ConfigError(f"must be positive, not {self.beta}", "beta")

    def at(self, step: int, total_steps: int | None) -> float:
        """Return the decay of update number `step` of `total_steps`, counted from 1.

        `constant` is `decay`; `threshold` is `min(decay, (1 + step) / (10 + step))`; `exp` is
        `decay * (1 - exp(-beta * step / total_steps))`.

        Raises:
            ConfigError: `exp` without `total_steps`.
        """
        if self.decay_type == "constant":
            return self.decay
        if self.decay_type == "threshold":
            return min(self.decay, (1 + step) / (10 + step))
        if total_steps is None:
            raise ConfigError(
                "'exp' needs to know the length of the training: set total_steps of the average, or take 'threshold'",
                "decay_type",
            )
        beta = 15.0 if self.beta is None else self.beta
        return self.decay * -math.expm1(-beta * step / total_steps)


@MODELS.register_module()
class ScheduledEMA(BaseAveragedModel):
    """An EMA in SuperGradients' words: average = d * average + (1 - d) * weights, with a growing decay d.

    As there, an update belongs to an optimizer step, not to a batch, and floating-point buffers are averaged too.

    Args:
        model: the model to average (unwrapped).
        decay, decay_type, beta: those of `DecaySchedule`.
        interval, device, update_buffers: those of `BaseAveragedModel`.
    """

    every_batch = False

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.9999,
        decay_type: str = "exp",
        beta: float | None = None,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = True,
    ) -> None:
        super().__init__(model, interval, device, update_buffers)
        self.schedule = DecaySchedule(decay, decay_type, beta)
        _check_precision(model, 1 - decay, "decay")

    def weight(self, step: int) -> float:
        """Return one minus the decay."""
        return 1.0 - self.schedule.at(step + 1, self.total_steps)


@MODELS.register_module()
class StochasticWeightAverage(BaseAveragedModel):
    """The plain mean of all weights seen (Izmailov et al. 2018, arXiv 1803.05407).

    Args:
        model: the model to average (unwrapped).
        every_batch: whether every batch counts, as in MMEngine, or only those after which the optimizer steps.
        args, kwargs: those of `BaseAveragedModel`.
    """

    def __init__(self, model: nn.Module, *args: Any, every_batch: bool = True, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.every_batch = every_batch

    def weight(self, step: int) -> float:
        """Return one over the number of weights averaged so far, this one included."""
        return 1.0 / (step // self.interval + 1)
