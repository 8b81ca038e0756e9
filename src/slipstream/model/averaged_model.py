"""Averages of model weights over training: EMA, EMA with annealed momentum, SWA; their options and their step part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from operator import is_, methodcaller
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from slipstream.dist import all_reduce_params
from slipstream.errors import ConfigError, ModelError
from slipstream.model.copies import copy_model, copy_sharded
from slipstream.model.weight_init import check_initialized
from slipstream.optim.optim_wrapper import AccumulationWindow, OptimWrapper
from slipstream.registry import MODELS
from slipstream.sharding import local_shard, mesh_of
from slipstream.step.numerics import HostNumber, precise_dtype
from slipstream.step.parts import StepPart
from slipstream.typecheck import NonNegativeInt, Positive, PositiveInt, Rule, check

__all__ = [
    "AveragePart", "BaseAveragedModel", "EmaOptions", "ExponentialMovingAverage", "MomentumAnnealingEMA",
    "ScheduledEMA", "StochasticWeightAverage", "check_begin",
]  # fmt: skip

_VALUES = methodcaller("values")
_Fraction = Annotated[float, Rule(lambda value: 0 < value < 1, "between 0 and 1 (decay = 1 - momentum)")]


class BaseAveragedModel(nn.Module):
    """A copy of a model with a running average of its weights.

    Subclasses define `weight(step)`, the coefficient of the current weights in update `step`. The first update copies
    the weights. The step count is a Python integer, so an update does not synchronize with the device. Training steps
    update the average through `AveragePart`. Parameters with integer or 8-bit dtypes are copied instead of averaged.

    Args:
        model: the model to average (unwrapped).
        interval: number of updates between changes to the average.
        device: device on which the average is stored. Default: the model's device.
        update_buffers: also average the buffers that `_averaged_buffers` returns. Other buffers are copied from the
            model. By default all buffers are copied, because BatchNorm statistics are already averages.

    Attributes:
        every_batch: whether every batch counts as an update, rather than only the last one of an accumulation window.
        counts_batches: whether the argument of `weight` counts batches, from the first one that is averaged, instead of
            updates.
        total_steps: number of updates in the whole training run, or of batches with `counts_batches`; see `start`.
        window: number of batches in an accumulation window; see `start`.
        steps: number of updates.
        swapped: whether the model contains the average, and `module` the training weights.
    """

    every_batch: bool = True
    counts_batches: bool = False
    total_steps: int | None = None
    window: int = 1
    swapped = False
    _part: AveragePart | None = None

    def __init__(
        self, model: nn.Module, interval: int = 1, device: Any = None, update_buffers: bool = False
    ) -> None:
        super().__init__()
        check(interval, PositiveInt, "interval")
        check(update_buffers, bool, "update_buffers")
        check_initialized(model)
        self.module = (copy_model(model) if mesh_of(model) is None else copy_sharded(model)).requires_grad_(
            False
        )
        if device is not None:
            self.module.to(device)
        self.device, self.interval, self.update_buffers, self.steps = device, interval, update_buffers, 0
        self._averaged_buffers = _averaged_buffers(model) if update_buffers else []

    def weight(self, step: int) -> float:
        """Return the coefficient of the model's current weights in update `step`."""
        raise NotImplementedError

    def start(self, total: int | None, skipped: int, accumulation: AccumulationWindow) -> str | None:
        """Set the length of training. Return a warning if the decay is too high for it; otherwise, return None.

        Args:
            total: number of batches in the run, or None if it is unknown.
            skipped: number of batches before the first batch that is averaged.
            accumulation: the accumulation windows of the optimizer.

        Raises:
            ConfigError: the decay depends on the length of training, which is unknown.
        """
        self.window, self.total_steps = accumulation.counts, None
        if total is None:
            self.weight(1)  # raises an error if it depends on the length of training
            return None
        updates = total - skipped if self.every_batch else accumulation.windows_between(skipped, total)
        self.total_steps = max(1, total - skipped if self.counts_batches else updates)
        if (mean := self.mean_update(updates)) >= (updates - self.interval) / 2:
            return None
        return (
            f"the EMA decay is too high for a run of {updates} updates: the average will be close to the "
            f"weights at update {mean:.0f}. Train longer, or use a smaller decay or type 'threshold'"
        )

    def mean_update(self, updates: int) -> float:
        """Return the mean update number (counted from 1), weighted by each update's contribution to the final average.

        For a plain mean of the weights after each update, the result is the midpoint of training.
        """
        batches = self.window if self.counts_batches else 1
        mean = 1.0
        for update in range(self.interval, updates, self.interval):
            mean += self.weight((update + 1) * batches - 1) * (update + 1 - mean)
        return mean

    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's current weights; the first call copies them."""
        if self._part is None or self._part.model is not model:
            self._part = AveragePart(self, model, lambda: self.steps)
        self._part.update()

    def restart(self, model: nn.Module) -> None:
        """Start again from the model's weights; the next update copies them."""
        self.steps = 0
        self.module.load_state_dict(model.state_dict())

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Copy all tensors that are not averaged. Call this method before using or saving the average."""
        averaged = set(map(id, self.tensors(self.module)))
        for own, other in zip(self.module.parameters(), model.parameters(), strict=True):
            if not _can_average(own):
                own.copy_(other)
        for new, source in zip(_modules(self.module), _modules(model), strict=True):
            for name, b in source._buffers.items():
                if id(new._buffers.get(name)) not in averaged:  # the shape may have changed
                    new._buffers[name] = None if b is None else b.detach().to(self.device, copy=True)

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Replace the averaged buffers on every rank with their mean over all ranks."""
        all_reduce_params([getattr(m, name) for m, name in self._slots(self.module)], op="mean")

    @torch.no_grad()
    def swap_in(self, model: nn.Module, average: bool) -> None:
        """Swap the averaged or the training weights into the model, unless it already contains them.

        The average is swapped in only after its first update. On one device, the tensors swap their storages without a
        copy. Between devices, and for a sharded model, the values are copied.
        """
        if self.swapped == (average and self.steps > 0):
            return
        # FSDP2 keeps references to the storages of sharded weights, and a captured graph stores their addresses.
        in_place = mesh_of(model) is not None
        pairs = list(zip(*self.pairs(model), strict=True))
        # If a forward pass has assigned one tensor to two buffers, only the reverse order restores it.
        for own, current in reversed(pairs) if self.swapped else pairs:
            if in_place or own.device != current.device:
                previous = current.clone()
                current.copy_(own)
                own.copy_(previous)
            else:
                own.data, current.data = current.data, own.data
        self.swapped = not self.swapped

    @contextmanager
    def swapped_in(self, model: nn.Module, average: bool) -> Iterator[nn.Module]:
        """Context manager within which the model contains the averaged (`average=True`) or the training weights."""
        before = self.swapped
        self.swap_in(model, average)
        try:
            yield model
        finally:
            self.swap_in(model, before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model."""
        return self.module(*args, **kwargs)

    def pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and the weights in the same order, without copies.

        For a sharded model, these are the local shards.
        """
        averages, currents = self.tensors(self.module), self.tensors(model)
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        for average, current in zip_longest(averages, currents):
            if average is None or current is None or average.shape != current.shape:
                raise ModelError(
                    f"'{names.get(id(current), 'a tensor')}' had another shape when the weight average (ema) was "
                    "created; replace layers before that, and create buffers with their final shape"
                )
        return averages, currents

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """Return the tensors of `model` or of `module` that are averaged."""
        return [*self._params(model), *(getattr(module, name) for module, name in self._slots(model))]

    def _params(self, model: nn.Module) -> list[Tensor]:
        return [local_shard(param) for param in model.parameters() if _can_average(param)]

    def _slots(self, model: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the owner and name of each averaged buffer, because a forward pass may replace the tensor."""
        modules = _modules(model)
        return [(modules[index], name) for index, name in self._averaged_buffers]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.steps = int(state_dict.pop(prefix + "steps", self.steps))
        super()._load_from_state_dict(state_dict, prefix, *args)


class AveragePart(StepPart):
    """Updates a weight average after each batch that counts as an update.

    With `every_batch` (as in MMEngine), every batch counts. Otherwise, only the last batch of an accumulation window
    counts.

    On the host, `before_batch` sets the weight of the new parameters, and `count_batch` counts the update. The weight
    is 0 if the batch is not an update, 1 for the first update, and for example 1 - decay for later updates. Because it
    is a `HostNumber`, neither the first update nor a change in the decay requires another graph. `after_batch` computes
    the average's lerp. A compiled step's graph contains this operation, unless `on_host` is set, or the batch ends an
    accumulation window and the graph does not contain the optimizer's update.

    Args:
        average: the average.
        model: the averaged model, unwrapped.
        batch_count: returns the number of completed training batches.
        optim: the optimizer wrapper, whose accumulation windows and other parts are known; None if every batch updates
            the weights.
        skipped: number of batches before the first batch that is averaged.
    """

    def __init__(
        self,
        average: BaseAveragedModel,
        model: nn.Module,
        batch_count: Callable[[], int],
        optim: OptimWrapper | None = None,
        skipped: int = 0,
    ) -> None:
        self.average, self.model, self.skipped, self._due = average, model, skipped, False
        self._batch_count, self._ends_window = batch_count, optim.ends_window if optim else lambda _: True
        self._is_always_due = average.window == 1 and not (skipped or average.counts_batches)
        averages, currents = self._find()
        self._weight = HostNumber(0.0, averages[0].device, precise_dtype(averages[0].device))
        self._moves = any(a.device != c.device for a, c in zip(averages, currents, strict=True))
        # - With an interval above 1, a graph would read and write the average even in steps that do not change it.
        # - Sharded weights may get new storage when they are first gathered.
        # - The NaN guard restores the buffers after a non-finite step, so they can only be averaged after it runs.
        is_guarded = optim is not None and any(part.nonfinite is not None for part in optim.parts)
        self.on_host = average.interval > 1 or self._moves or mesh_of(model) is not None or is_guarded

    def _find(self) -> tuple[list[Tensor], list[Tensor]]:
        """Find the averaged tensors and return them."""
        average, models = self.average, (self.average.module, self.model)
        self._owned = [own for m in self.model.modules() for own in (m._modules, m._parameters)]
        self._known = self._parts()
        self._tensors = [(average._params(model), average._slots(model)) for model in models]
        return average.pairs(self.model)

    def _parts(self) -> list[Any]:
        """Return the model's layers and parameters."""
        return list(chain.from_iterable(map(_VALUES, self._owned)))

    def update(self) -> None:
        """Update the average and count the update, outside a training step."""
        self.before_batch()
        self.after_batch()
        self.count_batch()

    def before_batch(self) -> None:
        """Set the weight of the new parameters (0 if the next batch is not an update)."""
        average, self._due = self.average, True
        step = average.steps
        if not self._is_always_due:
            batch = self._batch_count() + 1
            self._due = batch > self.skipped and (average.every_batch or self._ends_window(batch))
            if average.counts_batches:
                step = batch - self.skipped - 1
        weight = 0.0
        if self._due and average.steps % average.interval == 0:
            weight = average.weight(step) if average.steps else 1.0
        self._weight.set(weight)

    @torch.no_grad()
    def after_batch(self) -> None:
        """Update the average."""
        weight, compiling = self._weight.value, torch.compiler.is_compiling()
        if not compiling:
            if not weight:
                return
            parts = self._parts()
            if len(parts) != len(self._known) or not all(map(is_, parts, self._known)):
                self._find()  # a layer or parameter was replaced
        averages, currents = (
            [*params, *(getattr(module, name) for module, name in slots)] for params, slots in self._tensors
        )
        if compiling:
            self._trace(averages, currents)
            return
        if self._moves:
            currents = [tensor.to(averages[0].device) for tensor in currents]
        try:
            if weight == 1:
                torch._foreach_copy_(averages, currents)
            else:
                torch._foreach_lerp_(averages, currents, weight)
        except RuntimeError:
            self._find()  # raises an error if a shape has changed
            raise

    def _trace(self, averages: list[Tensor], currents: list[Tensor]) -> None:
        """Update the average in a compiled step."""
        for average, current in zip(averages, currents, strict=True):
            # Compute in the precision of the foreach kernels. Unlike lerp with weight 0 or 1, where() ignores the other
            # tensor even if it is not finite.
            precise = torch.promote_types(average.dtype, torch.float32)
            weight, new = self._weight.read().to(average.device, precise), current.detach().to(precise)
            mixed = torch.where(weight == 1, new, average.to(precise).lerp(new, weight)).to(average.dtype)
            average.copy_(torch.where(weight == 0, average, mixed))

    def count_batch(self) -> None:
        """Count the batch's update of the average."""
        self.average.steps += self._due

    def state(self) -> Mapping[str, Tensor]:
        """Return the averages."""
        return {f"average[{i}]": tensor for i, tensor in enumerate(self.average.tensors(self.average.module))}


def _can_average(tensor: Tensor) -> bool:
    """Return whether torch can interpolate between tensors of this kind."""
    inexact = tensor.is_floating_point() or tensor.is_complex()
    return inexact and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the model, in the same order for a model and its `copy_model`."""
    return [module for module in model.modules() if not isinstance(module, DistributedDataParallel)]


def _averaged_buffers(model: nn.Module) -> list[tuple[int, str]]:
    """Return the position in `_modules` and the name of each buffer that can be averaged.

    These are the saved floating-point buffers, except:

    - buffers with infinite values (such as an attention mask or an initial minimum), because the average of two
      infinite values is NaN,
    - buffers from which a weight is computed (of a parametrization, or of torch's older spectral norm and pruning,
      which store the parameter as `NAME_orig`), because they belong to the current weight, and
    - buffers of unit vectors (such as the vectors of a custom spectral norm, or a queue of normalized features),
      because an average of directions is not a direction.
    """
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    parametrized = {module for each in lists for module in each.modules()}
    found: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(_modules(model)):
        weights = tuple(key.removesuffix("orig") for key in module._parameters if key.endswith("_orig"))
        for name, buffer in module._buffers.items():
            is_state = module in parametrized or name.startswith(weights)
            if buffer is None or is_state or name in module._non_persistent_buffers_set:
                continue
            if _can_average(buffer) and bool(buffer.isfinite().all()) and not _has_unit_vectors(buffer):
                found.setdefault(id(buffer), (index, name))
    return list(found.values())


def _has_unit_vectors(buffer: Tensor) -> bool:
    """Return whether all vectors along one of the dimensions have length 1."""
    lengths = [buffer.abs().float().norm(dim=dim) for dim, size in enumerate(buffer.shape) if size > 1]
    tolerance = 16 * torch.finfo(buffer.dtype).eps
    return any(bool(((length - 1).abs() < tolerance).all()) for length in lengths)


def _check_precision(model: nn.Module, weight: float, key: str) -> None:
    """Raise a ConfigError if a parameter's dtype is too imprecise for updates with this coefficient."""
    for name, param in model.named_parameters():
        if _can_average(param) and torch.finfo(param.dtype).eps > weight:
            raise ConfigError(
                f"the average of '{name}' would not change, because updates of {weight:g} are rounded away in "
                f"{param.dtype}; keep the weights in float32 (and use autocast)",
                key,
            )


@MODELS.register_module()
class ExponentialMovingAverage(BaseAveragedModel):
    """An EMA with a small constant momentum: average = (1 - momentum) * average + momentum * weights."""

    def __init__(self, model: nn.Module, momentum: float = 0.0002, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        check(momentum, _Fraction, "momentum")
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


@MODELS.register_module()
class ScheduledEMA(BaseAveragedModel):
    """SuperGradients' EMA: average = d * average + (1 - d) * weights, with an increasing decay d.

    As in SuperGradients, the average is updated once per optimizer step instead of once per batch, and includes
    floating-point buffers. In update s (counted from 1) of S, the decay d is `decay` for the type `constant`,
    `min(decay, (1 + s) / (10 + s))` for `threshold`, and `decay * (1 - exp(-beta * s / S))` for `exp`.

    Args:
        model: the model to average (unwrapped).
        decay: maximum decay, between 0 and 1.
        decay_type: `constant`, `threshold` or `exp`.
        beta: rate at which the decay approaches its maximum. Default: 15. Applies only to `exp`.
        count: unit of s and S: `updates`, or `batches` as in SuperGradients. The two differ if gradients are
            accumulated.
        function: computes the decay as `function(decay, s, S)`; replaces `decay_type`.
        update_buffers, kwargs: see `BaseAveragedModel`.
    """

    every_batch = False

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.9999,
        decay_type: str = "exp",
        beta: float | None = None,
        count: str = "updates",
        function: Callable[[float, int, int], float] | None = None,
        update_buffers: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, update_buffers=update_buffers, **kwargs)
        self.decay = check(decay, _Fraction, "decay")
        self.decay_type = check(decay_type, Literal["constant", "threshold", "exp"], "decay_type")
        self.beta = check(beta, Positive | None, "beta")
        if beta is not None and decay_type != "exp":
            raise ConfigError(f"applies only to decay_type 'exp', not '{decay_type}'; remove it", "beta")
        self.counts_batches = check(count, Literal["updates", "batches"], "count") == "batches"
        self.function = function
        _check_precision(model, 1 - decay, "decay")

    def weight(self, step: int) -> float:
        """Return one minus the decay.

        Raises:
            ConfigError: the type is `exp`, and the number of updates or batches in the run is unknown.
        """
        number, total = step + 1, self.total_steps
        if self.function is not None:
            return 1.0 - self.function(self.decay, number, number if total is None else total)
        if self.decay_type == "constant":
            return 1.0 - self.decay
        if self.decay_type == "threshold":
            return 1.0 - min(self.decay, (1 + number) / (10 + number))
        if total is None:
            raise ConfigError(
                "'exp' requires a known number of training steps; use 'threshold'", "decay_type"
            )
        return 1.0 - self.decay * -math.expm1(-(self.beta or 15.0) * number / total)


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


@dataclass(frozen=True)
class EmaOptions:
    """Options of `speed=dict(ema=dict(...))`; True selects the defaults.

    Args:
        decay: maximum decay (the weight of the old average in an update); None means 0.9999.
        type: decay schedule: `constant`, `threshold` or `exp`; or `swa` for the mean of the weights over all updates.
        beta: rate at which the decay of type `exp` approaches its maximum; None means 15. Only for `exp`.
        interval: number of weight updates per update of the average. The first weight update also updates the average.
        begin_iter, begin_epoch: first iteration or epoch whose weights are averaged; set at most one of them.
        count: unit of the steps in the decay schedule: `updates`, or `batches` as in SuperGradients.
        update_buffers: whether to average floating-point buffers, such as BatchNorm statistics, or to copy them.
    """

    decay: float | None = None
    type: Literal["constant", "threshold", "exp", "swa"] = "exp"
    beta: float | None = None
    interval: PositiveInt = 1
    begin_iter: NonNegativeInt = 0
    begin_epoch: NonNegativeInt = 0
    count: Literal["updates", "batches"] = "updates"
    update_buffers: bool = True

    def __post_init__(self) -> None:
        check_begin(self.begin_iter, self.begin_epoch)
        self.average(nn.Identity())  # checks the options

    def average(self, model: nn.Module) -> BaseAveragedModel:
        """Return an average of this type, initialized with the model's weights."""
        options: dict[str, Any] = {"interval": self.interval, "update_buffers": self.update_buffers}
        decay = {key: value for key in ("decay", "beta") if (value := getattr(self, key)) is not None}
        if self.type != "swa":
            return ScheduledEMA(model, decay_type=self.type, count=self.count, **decay, **options)
        if decay:
            raise ConfigError(
                "does not apply to type 'swa', which is a plain mean; remove it", next(iter(decay))
            )
        return StochasticWeightAverage(model, every_batch=False, **options)


def check_begin(begin_iter: int, begin_epoch: int) -> None:
    """Raise a ConfigError if both arguments are set, or if one of them is negative."""
    check(begin_iter, NonNegativeInt, "begin_iter")
    check(begin_epoch, NonNegativeInt, "begin_epoch")
    if begin_iter and begin_epoch:
        raise ConfigError("set begin_iter or begin_epoch, not both", "begin_epoch")
