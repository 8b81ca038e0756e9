"""Averages of model weights over training: EMA, EMA with annealed momentum, SWA."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from slipstream.dist import all_reduce_params
from slipstream.errors import ConfigError, ModelError
from slipstream.model.weight_init import check_initialized
from slipstream.registry import MODELS
from slipstream.sharding import local_shard, mesh_of
from slipstream.step.average import copy_to
from slipstream.typecheck import Positive, PositiveInt, Rule, check

__all__ = [
    "BaseAveragedModel", "DecaySchedule", "ExponentialMovingAverage", "MomentumAnnealingEMA", "ScheduledEMA",
    "StochasticWeightAverage",
]  # fmt: skip

_VALUES = methodcaller("values")
_Momentum = Annotated[
    float, Rule(lambda value: 0 < value < 1, "between 0 and 1, the coefficient of the new weights")
]
_Decay = Annotated[
    float, Rule(lambda value: 0 < value < 1, "between 0 and 1, the coefficient of the old average")
]


class BaseAveragedModel(nn.Module):
    """A copy of a model with a running average of its weights.

    Subclasses define `weight(step)`, the coefficient of the current weights in update `step`. The first update copies
    the weights. The step count is a Python integer, so an update does not synchronize with the device. Training steps
    update the average through `AveragePart`.

    Args:
        model: the model to average (unwrapped).
        interval: number of updates between changes to the average.
        device: device on which the average is stored. Default: the model's device.
        update_buffers: also average the floating-point buffers in `state_dict` that contain only finite values. Other
            buffers are copied from the model. By default all buffers are copied, because BatchNorm statistics are
            already averages.
    """

    every_batch: bool = True
    """Whether every batch counts as an update, rather than only the last batch of an accumulation window."""
    total_steps: int | None = None
    """Number of updates in the whole training run, set by the code that creates the average."""
    total_batches: int | None = None
    """Number of batches in the whole training run, set by the code that creates the average."""
    window: int = 1
    """Number of batches in an accumulation window, set by the code that creates the average."""

    def __init__(
        self,
        model: nn.Module,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__()
        check(interval, PositiveInt, "interval")
        check_initialized(model)
        self.module = (_copy(model) if mesh_of(model) is None else _sharded_copy(model)).requires_grad_(False)
        if device is not None:
            self.module.to(device)
        self.device = device
        self.interval = interval
        self.update_buffers = update_buffers
        self.steps = 0
        self.swapped = False
        """Whether the weights are swapped; if so, the model contains the average and `module` the training weights."""
        self._averaged_buffers = _averaged_buffers(self.module) if update_buffers else ()
        self._cached: tuple[nn.Module, _AveragedTensors, _AveragedTensors] | None = None

    def weight(self, step: int) -> float:
        """Return the coefficient of the model's current weights in update `step`."""
        raise NotImplementedError

    def next_weight(self) -> float:
        """Return the coefficient of the current weights in the next update: 1 copies them, 0 keeps the average."""
        if self.steps % self.interval:
            return 0.0
        return self.weight(self.steps) if self.steps else 1.0

    def mean_update(self) -> float:
        """Return the mean update number (counted from 1), weighted by each update's contribution to the final average.

        For a plain mean of the weights after each update, the result is the midpoint of training.
        """
        assert self.total_steps is not None, "total_steps must be set"
        last = self.weight(self.total_steps - 1)
        if self.total_steps * last > 4 * self.interval:
            # The coefficients decrease, so using the last one for all updates gives a lower bound on the mean.
            return self.total_steps - self.interval / last
        mean = 1.0
        for step in range(self.interval, self.total_steps, self.interval):
            mean += self.weight(step) * (step + 1 - mean)
        return mean

    def lagging_update(self) -> float | None:
        """Return `mean_update` if the decay is too high for the length of the run; otherwise, return None."""
        if not self.total_steps or (mean := self.mean_update()) >= (self.total_steps - self.interval) / 2:
            return None
        return mean

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's current weights; the first call copies them."""
        weight = self.next_weight()
        self.steps += 1
        if not weight:
            return
        average, current = self.pairs(model)
        if self.device is not None:
            current = copy_to(torch.device(self.device), current)
        torch._foreach_lerp_(average, current, weight)

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Copy the model's buffers that are not averaged. Call this method before using or saving the average."""
        self.check_buffers(model)
        averaged = {id(t) for t in self._averaged(self.module).tensors()}
        for average, current in zip(self.module.buffers(), model.buffers(), strict=True):
            if id(average) not in averaged:
                average.copy_(current)

    def check_buffers(self, model: nn.Module) -> None:
        """Raise a ModelError if a buffer of the model has a different shape than when the average was created."""
        own, current = ({n: tuple(b.shape) for n, b in m.named_buffers()} for m in (self.module, model))
        for name in {**own, **current}:
            if own.get(name) != current.get(name):
                raise ModelError(
                    f"the buffer '{name}' has changed from shape {own.get(name)} to {current.get(name)} since the "
                    "weight average was created; create the buffer with its final shape, or remove the average (ema)"
                )

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Replace the averaged buffers on every rank with their mean over all ranks."""
        all_reduce_params(self._buffers_of(self.module), op="mean")

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Swap the averaged weights and the current weights; a second call restores both.

        On one device, the tensors swap their storages without a copy. Between devices, and for a sharded model, the
        values are copied.
        """
        # FSDP2 keeps references to the storages of sharded weights, and a captured graph stores their addresses.
        in_place = mesh_of(model) is not None
        for average, current in zip(*self.pairs(model), strict=True):
            if in_place or average.device != current.device:
                previous = current.clone()
                current.copy_(average)
                average.copy_(previous)
            else:
                average.data, current.data = current.data, average.data
        self.swapped = not self.swapped

    def swap_in(self, model: nn.Module, average: bool) -> None:
        """Swap the averaged or the training weights into the model, unless it already contains them."""
        if self.steps and average != self.swapped:
            self.swap(model)

    @contextmanager
    def swapped_in(self, model: nn.Module, average: bool) -> Iterator[None]:
        """Context manager within which the model contains the averaged (`average=True`) or the training weights."""
        before = self.swapped
        self.swap_in(model, average)
        try:
            yield
        finally:
            self.swap_in(model, before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model."""
        return self.module(*args, **kwargs)

    def pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and the weights in the same order, without copies.

        For a sharded model, these are the local shards.
        """
        cached = self._cached
        if cached is None or cached[0] is not model or not (is_compiling() or cached[2].is_current()):
            # Store the model in a tuple, because assigning it to an attribute would register it as a submodule.
            cached = (model, self._averaged(self.module), self._averaged(model))
            if [t.shape for t in cached[1].tensors()] != [t.shape for t in cached[2].tensors()]:
                raise ModelError(
                    "a layer was replaced after the weight average was created, and the new layer has different "
                    "parameters; replace layers before creating the average"
                )
            self._cached = cached
        return cached[1].tensors(), cached[2].tensors()

    def _averaged(self, model: nn.Module) -> _AveragedTensors:
        modules = list(model.modules())
        owners = {id(b): (m, name) for m in modules for name, b in m._buffers.items() if b is not None}
        owned: list[dict[str, Any]] = [m._modules for m in modules] + [m._parameters for m in modules]
        params = [local_shard(param) for param in model.parameters()]
        averaged = [owners[id(buffer)] for buffer in self._buffers_of(model)]
        return _AveragedTensors(params, averaged, owned, _values(owned))

    def _buffers_of(self, model: nn.Module) -> list[Tensor]:
        """Return the buffers that are averaged."""
        buffers = list(model.buffers())
        return [buffers[index] for index in self._averaged_buffers]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.steps = int(state_dict.pop(prefix + "steps", self.steps))
        super()._load_from_state_dict(state_dict, prefix, *args)


class _AveragedTensors(NamedTuple):
    """The tensors of a model that are averaged."""

    params: list[Tensor]
    buffers: list[tuple[nn.Module, str]]
    """The owner and name of each buffer, instead of its tensor, because a forward pass may replace the tensor."""
    owned: list[dict[str, Any]]
    """The `_modules` and `_parameters` dicts of all modules in the model."""
    values: list[Any]
    """The submodules and parameters in `owned`, in order."""

    def is_current(self) -> bool:
        """Return whether all modules and parameters are still the same objects."""
        current = _values(self.owned)
        return len(current) == len(self.values) and all(map(is_, current, self.values))

    def tensors(self) -> list[Tensor]:
        """Return the current tensors."""
        return [*self.params, *(getattr(module, name) for module, name in self.buffers)]


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, dicts)))


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model without DDP wrappers, which are required only for training.

    `deepcopy` does not support tensors that are computed from parameters, such as the weights stored by pruning and
    `weight_norm`. These tensors are detached and cloned.
    """
    computed = (value for module in model.modules() for value in vars(module).values())
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for value in computed
        if isinstance(value, Tensor) and not value.is_leaf
    }
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            memo[id(module)] = copy.deepcopy(module.module, memo)
    return copy.deepcopy(model, memo)


def _averaged_buffers(model: nn.Module) -> list[int]:
    """Return the indices of the buffers that can be averaged and are saved.

    Buffers with infinite values (such as an attention mask or an initial minimum) are excluded, because the average of
    two infinite values is NaN.
    """
    saved = model.state_dict()
    return [
        index
        for index, (name, buffer) in enumerate(model.named_buffers())
        if name in saved and buffer.is_floating_point() and bool(buffer.isfinite().all())
    ]


def _check_precision(model: nn.Module, weight: float, key: str) -> None:
    """Raise a ConfigError if a parameter's dtype is too imprecise for updates with this coefficient."""
    for name, param in model.named_parameters():
        if param.is_floating_point() and torch.finfo(param.dtype).eps > weight:
            raise ConfigError(
                f"the average of '{name}' would not change, because updates of {weight:g} are rounded away in "
                f"{param.dtype}; keep the weights in float32 (and use autocast)",
                key,
            )


def _sharded_copy(model: nn.Module, copied: dict[Any, Any] | None = None) -> nn.Module:
    """Return a module that contains copies of a sharded model's tensors and has no `forward` method.

    `deepcopy` does not support sharded tensors.
    """
    copied = {None: None} if copied is None else copied
    new = copied[model] = nn.Module()
    for name, param in model._parameters.items():
        if param is not None and param not in copied:
            copied[param] = nn.Parameter(param.detach().clone(), requires_grad=False)
        new.register_parameter(name, copied[param])
    for name, buffer in model._buffers.items():
        if buffer is not None and buffer not in copied:
            copied[buffer] = buffer.clone()
        new.register_buffer(name, copied[buffer], name not in model._non_persistent_buffers_set)
    for name, child in model._modules.items():
        if child is not None and child not in copied:
            _sharded_copy(child, copied)
        new.register_module(name, copied[child])
    return new


@MODELS.register_module()
class ExponentialMovingAverage(BaseAveragedModel):
    """An EMA with a small constant momentum: average = (1 - momentum) * average + momentum * weights."""

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__(model, interval, device, update_buffers)
        check(momentum, _Momentum, "momentum")
        _check_precision(model, momentum, "momentum")
        self.momentum = momentum

    def weight(self, step: int) -> float:
        """Return the constant momentum."""
        return self.momentum


@MODELS.register_module()
class MomentumAnnealingEMA(ExponentialMovingAverage):
    """An EMA with momentum max(momentum, gamma / (gamma + step)), so early weights have less influence."""

    def __init__(self, model: nn.Module, momentum: float = 0.0002, gamma: int = 100, **kwargs: Any) -> None:
        super().__init__(model, momentum, **kwargs)
        check(gamma, PositiveInt, "gamma")
        self.gamma = gamma

    def weight(self, step: int) -> float:
        """Return the annealed momentum."""
        return max(self.momentum, self.gamma / (self.gamma + step))


@dataclass(frozen=True)
class DecaySchedule:
    """Schedule of an EMA's decay, with the keys of SuperGradients' `ema_params`."""

    decay: float = 0.9999
    """Maximum decay, between 0 and 1; the decay is the coefficient of the old average in an update."""
    decay_type: str = "exp"
    """`constant`, `threshold` or `exp`."""
    beta: float | None = None
    """Rate at which the decay approaches its maximum. Default: 15. Applies only to `exp`."""

    def __post_init__(self) -> None:
        check(self.decay, _Decay, "decay")
        check(self.decay_type, Literal["constant", "threshold", "exp"], "decay_type")
        check(self.beta, Positive | None, "beta")
        if self.beta is not None and self.decay_type != "exp":
            raise ConfigError(f"applies only to decay_type 'exp', not '{self.decay_type}'; remove it", "beta")

    def at(self, step: int, total_steps: int | None) -> float:
        """Return the decay for update `step` (counted from 1) of `total_steps` updates.

        `constant` is `decay`; `threshold` is `min(decay, (1 + step) / (10 + step))`; `exp` is
        `decay * (1 - exp(-beta * step / total_steps))`.

        Raises:
            ConfigError: if the type is `exp` and `total_steps` is None.
        """
        if self.decay_type == "constant":
            return self.decay
        if self.decay_type == "threshold":
            return min(self.decay, (1 + step) / (10 + step))
        if total_steps is None:
            raise ConfigError(
                "'exp' requires the number of training steps; set the average's total_steps, or use 'threshold'",
                "decay_type",
            )
        beta = 15.0 if self.beta is None else self.beta
        return self.decay * -math.expm1(-beta * step / total_steps)


@MODELS.register_module()
class ScheduledEMA(BaseAveragedModel):
    """SuperGradients' EMA: average = d * average + (1 - d) * weights, with an increasing decay d.

    As in SuperGradients, the average is updated once per optimizer step instead of once per batch, and includes
    floating-point buffers.

    Args:
        model: the model to average (unwrapped).
        decay, decay_type, beta: see `DecaySchedule`.
        interval, device, update_buffers: see `BaseAveragedModel`.
        count: unit of the steps in the decay schedule: `updates`, or `batches` as in SuperGradients. The two differ if
            gradients are accumulated.
        function: computes the decay as `function(decay, step, total_steps)`; replaces `decay_type`.
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
        count: str = "updates",
        function: Callable[[float, int, int], float] | None = None,
    ) -> None:
        super().__init__(model, interval, device, update_buffers)
        self.function = function
        self.count = check(count, Literal["updates", "batches"], "count")
        self.schedule = DecaySchedule(decay, decay_type, beta)
        _check_precision(model, 1 - decay, "decay")

    def weight(self, step: int) -> float:
        """Return one minus the decay."""
        if self.count == "updates":
            return 1.0 - self._decay(step + 1, self.total_steps)
        batches, total = (step + 1) * self.window, self.total_batches
        return 1.0 - self._decay(batches if total is None else min(batches, total), total)

    def _decay(self, step: int, total: int | None) -> float:
        if self.function is None:
            return self.schedule.at(step, total)
        return self.function(self.schedule.decay, step, step if total is None else total)


@MODELS.register_module()
class StochasticWeightAverage(BaseAveragedModel):
    """The mean of the weights after each update (Izmailov et al. 2018, arXiv 1803.05407).

    Args:
        model: the model to average (unwrapped).
        every_batch: whether every batch counts as an update, as in MMEngine, or only batches with an optimizer step.
        args, kwargs: other arguments for `BaseAveragedModel`.
    """

    def __init__(self, model: nn.Module, *args: Any, every_batch: bool = True, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.every_batch = every_batch

    def weight(self, step: int) -> float:
        """Return 1 / n for the n-th set of weights in the average."""
        return 1.0 / (step // self.interval + 1)
