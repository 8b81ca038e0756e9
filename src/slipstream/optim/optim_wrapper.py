"""The optimizer wrapper, which runs backward passes, accumulates and clips gradients, and runs optimizer steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer

from slipstream.config import options
from slipstream.dist import get_world_size, traceable_sum
from slipstream.errors import ConfigError, LossError, ModelError
from slipstream.optim.kernels import FusedLayouts, lay_out_states, replace_kernel_options
from slipstream.registry import OPTIM_WRAPPERS
from slipstream.sharding import full_tensor, is_sharded, max_abs, shard_like
from slipstream.step.function import EagerUpdate, finish
from slipstream.step.losses import AVERAGED_OVER
from slipstream.step.numerics import HostNumber, LossScale, scale_
from slipstream.step.parts import StepPart
from slipstream.typecheck import PositiveInt, Rule, check

_NO_CONTEXT = nullcontext()


# An infinite limit disables clipping, but the gradient norm is still logged.
_Limit = Annotated[float, Rule(lambda value: value > 0, "above 0")]


@dataclass(frozen=True)
class GradClip:
    """Gradient clipping options, for example `dict(max_norm=35, norm_type=2)` in a configuration."""

    type: Literal["norm", "value"] = "norm"
    max_norm: _Limit | None = None
    norm_type: _Limit = 2.0
    clip_value: _Limit | None = None

    def __post_init__(self) -> None:
        """Check that type 'norm' has `max_norm`, and type 'value' has `clip_value`."""
        name = "max_norm" if self.type == "norm" else "clip_value"
        if getattr(self, name) is None:
            raise ConfigError(f"type '{self.type}' requires a positive {name}")


class ClipGradients(StepPart):
    """Clip the gradients by their total norm or by value before the update."""

    def __init__(self, options: GradClip) -> None:
        self.options, self.max_norm = options, options.max_norm

    def before_batch(self) -> None:
        """Write the maximum norm to the number that graphs read."""
        if self.limit is not None and self.max_norm is not None:
            self.limit.set(self.max_norm)

    def before_update(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> Mapping[str, Tensor]:
        """Clip in place; for type 'norm', return the norm before clipping as `grad_norm` (0-dim, on the device)."""
        options = self.options
        if options.type == "value":
            assert options.clip_value is not None
            torch._foreach_clamp_min_(grads, -options.clip_value)
            torch._foreach_clamp_max_(grads, options.clip_value)
            return {}
        assert self.max_norm is not None
        norm = total_norm(grads, options.norm_type)
        limit: Any = self.max_norm
        if torch.compiler.is_compiling() and self.limit is not None:
            limit = self.limit.read().to(norm.dtype)
        scale_(grads, ((norm + 1e-6).reciprocal() * limit).clamp(max=1.0))
        return {"grad_norm": norm}


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the total norm of all tensors (0-dim). For sharded tensors, this is the norm over all processes."""
    if math.isinf(norm_type) and any(map(is_sharded, tensors)):
        return max_abs(tensors)
    return full_tensor(nn.utils.get_total_norm(tensors, norm_type))


def _mean_over_ranks(value: Tensor) -> Tensor:
    ranks = get_world_size()
    return value if ranks == 1 else traceable_sum(value) / ranks


@dataclass
class AccumulationWindow:
    """Counts batches, and determines where accumulation windows begin and end.

    A window contains `size` batches. It also ends with the last batch of the run and, if `batches_per_epoch` is set,
    with the last batch of each epoch, so such windows can be smaller.
    """

    # Number of batches per window.
    counts: int = 1
    # Total number of batches of the run, or -1 if it is unknown.
    total: int = -1
    # Number of batches per epoch if windows end at the end of each epoch; otherwise None.
    batches_per_epoch: int | None = None
    # Number of batches trained on, including those before resuming.
    count: int = 0
    # Value of `count` at the end of the last window.
    start: int = 0

    def ends(self, count: int) -> bool:
        """Return whether batch number `count` (counted from 1) ends a window."""
        in_epoch = count % self.batches_per_epoch if self.batches_per_epoch else count
        return in_epoch % self.counts == 0 or count == self.total

    @property
    def ends_next(self) -> bool:
        """Whether the next batch ends its window."""
        return self.ends(self.count + 1)

    def windows_between(self, first: int, last: int) -> int:
        """Return the number of windows that end after batch `first`, up to batch `last`, which ends the run."""
        epoch, counts = self.batches_per_epoch or last + 1, self.counts
        per_epoch = -(-epoch // counts)
        before = first // epoch * per_epoch + first % epoch // counts
        return last // epoch * per_epoch + -(-(last % epoch) // counts) - before

    def advance(self) -> None:
        """Count a batch."""
        self.count += 1
        if self.counts == 1 or self.ends(self.count):
            self.start = self.count

    @property
    def size(self) -> int:
        """Number of batches in the window that contains the next batch."""
        if self.counts == 1 and self.start == self.count:
            return 1
        in_epoch = self.count % self.batches_per_epoch if self.batches_per_epoch else self.count
        first = self.count - in_epoch  # the first batch of the epoch
        ends = [first + in_epoch - in_epoch % self.counts + self.counts]
        if self.batches_per_epoch:
            ends.append(first + self.batches_per_epoch)
        if self.total > self.count:
            ends.append(self.total)
        return min(ends) - self.start

    @property
    def position(self) -> tuple[int, int]:
        """`count` and `start`."""
        return self.count, self.start

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        self.count, self.start = position

    @property
    def unfinished(self) -> int:
        """Number of batches since the end of the last window.

        If a run ends with a smaller window and is then extended, the next window is also smaller than `counts`.
        Therefore, this value cannot be inferred from the number of completed batches, and checkpoints contain it.
        """
        return self.count - self.start

    def move_to(self, count: int, has_gradients: bool) -> None:
        """Continue after `count` batches; if there are gradients, in the middle of a window where one is open."""
        self.count = self.start = count
        if has_gradients and not self.ends(count):
            in_epoch = count % self.batches_per_epoch if self.batches_per_epoch else count
            self.start = count - in_epoch % self.counts


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """An optimizer with gradient accumulation and clipping; call `update_params(loss)` once per batch.

    Args:
        optimizer: a `torch.optim.Optimizer`.
        accumulative_counts: number of batches in an accumulation window, which ends with an optimizer step. Each
            loss is divided by the size of its window, so the step uses the mean gradient of the window. The last window
            of a run may be smaller.
        clip_grad: gradient clipping options (see `GradClip`), or None.
    """

    loss_scale: LossScale | None = None
    """The loss scale; always None in this class."""
    dtype: torch.dtype | None = None
    """Autocast dtype; always None in this class."""
    objects: Tensor | None = None
    """The number of objects in the window, accumulated as its gradients are, and the unit of this number: the number in
    the first batch of all processes. None if the losses are not weighted."""
    training = False
    """Whether `switch_mode` has put the optimizer into training mode."""

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: PositiveInt = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        check(accumulative_counts, PositiveInt, "accumulative_counts")
        self.optimizer = optimizer
        closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__}.step requires a closure, which is not supported", "optimizer"
            )
        self.clip_grad = options(GradClip, clip_grad, "clip_grad") if clip_grad else None
        # Step parts that eager and compiled steps run around each update, in list order.
        self.parts: list[StepPart] = [ClipGradients(self.clip_grad)] if self.clip_grad else []
        # Values to log, as returned by the parts in the last update.
        self.logs: dict[str, Tensor] = {}
        self.accumulation = AccumulationWindow(accumulative_counts)
        # Whether the optimizer overrides `zero_grad`, and may therefore set gradients to zero instead of None.
        self.overrides_zero_grad = getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad
        self._layouts, self._update = FusedLayouts(optimizer), EagerUpdate(optimizer)
        self._trains = False  # whether a backward pass has produced a gradient

    # ---- one step: obtain the gradients and finish the update -----------------------------------------------

    def update_params(self, loss: Tensor, averaged_over: Tensor | None = None, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`; at the end of an accumulation window, update the weights.

        Args:
            loss: a scalar tensor.
            averaged_over: the number of objects of which `loss` is the mean (see `weight_of`).
            kwargs: arguments for `Tensor.backward`, for example `inputs`.
        """
        for part in self.parts:
            if "after_loss" in part.implements:
                part.after_loss(loss)
        if averaged_over is not None or self.objects is not None:
            loss = loss * self.weight_of(averaged_over, loss)
        self.obtain(loss, **kwargs)
        if self.should_update():
            self.finish()

    def obtain(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a batch to those of its accumulation window; `kwargs` are arguments for `backward`."""
        self.backward(self.scale_loss(loss), **kwargs)

    def finish(self) -> None:
        """Update the weights with the gradients of the accumulation window, and clear the gradients."""
        self.step()
        self.zero_grad()

    def weight_of(self, number: Tensor | None, loss: Tensor, window: HostNumber | None = None) -> Tensor:
        """Count the objects of which the loss of a batch is the mean, and return the weight of this loss.

        At the end of the window, `normalize` divides the gradients by the number of objects in the window, so the
        update uses the mean over these objects.

        Args:
            number: the number of objects.
            loss: the loss, whose dtype determines the precision.
            window: the number of batches in the window, if a graph reads it.

        Raises:
            LossError: only some batches have a number, or a method that uses it is overridden.
        """
        if number is None or (self.objects is None and not self.begins_window()):
            raise LossError(f"'{AVERAGED_OVER}' is missing in some batches; return it in all or in none")
        if self.objects is None:
            methods = type(self).update_params, type(self).step
            own = [m.__qualname__ for m in methods if not m.__module__.startswith("slipstream.")]
            if own:
                raise LossError(f"{own[0]} does not support '{AVERAGED_OVER}'; use OptimWrapper")
            unit = number.detach().to(loss.device, torch.promote_types(loss.dtype, torch.float32))
            unit = _mean_over_ranks(unit) * get_world_size()
            self.objects = torch.stack([torch.zeros_like(unit), torch.where(unit > 0, unit, 1)])
        weight = number.detach() * get_world_size() / self.objects[1]
        self.objects[0] += weight / (self.accumulation.size if window is None else window.read())
        return weight

    def normalize(self, grads: list[Tensor]) -> None:
        """Divide the weighted gradients of a window by its number of objects, averaged over all ranks."""
        assert self.objects is not None
        mean = _mean_over_ranks(self.objects[0])
        scale_(grads, torch.where(mean > 0, mean, 1).reciprocal())
        self.objects[0].zero_()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss by the number of batches in its accumulation window."""
        window = self.accumulation.size
        return loss if window == 1 else loss / window

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass and count the batch.

        Raises:
            ModelError: at the end of the first accumulation window, none of the optimizer's parameters has a gradient.
        """
        if (scale := self.loss_scale) is not None:
            loss = loss * scale.scale.to(loss.device)
        inputs = kwargs.get("inputs", ())
        is_plain = type(loss) is Tensor and loss.ndim == 0 and loss.is_floating_point()
        known = kwargs.keys() <= {"inputs"} and type(inputs) in (list, tuple) and (inputs or not kwargs)
        if is_plain and known and not torch._C._are_functorch_transforms_active():
            # This omits torch's checks of the gradient of the loss, which is 1. The gradient of a parameter can be a
            # view of this tensor, so each call creates its own.
            start = (torch.ones_like(loss),)
            _engine_run_backward(
                (loss,), start, False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
            )
        else:
            loss.backward(**kwargs)
        self.accumulation.advance()
        # Before the last batch of a window, FSDP2 does not store the gradients in `p.grad`.
        if not self._trains and self.accumulation.unfinished == 0:
            self._check_any_gradient()

    def _check_any_gradient(self) -> None:
        # A hook may have used and cleared the gradient.
        if not any(p.grad is not None or p._post_accumulate_grad_hooks for p in self.parameters()):
            raise ModelError(
                "the loss does not depend on any of the optimizer's parameters; check that the model's outputs are not "
                "detached or computed under torch.no_grad(), and that the optimizer contains the model's parameters"
            )
        self._trains = True

    def step(self, **kwargs: Any) -> None:
        """Finish the window: unscale and check the gradients, run the parts, and run the optimizer's step.

        Gradients may already be unscaled with `loss_scaler.unscale_(optimizer)`, for example to clip them.
        """
        groups = self.optimizer.param_groups
        if any(group.get("fused") for group in groups):
            self._layouts()
        needs_gradients = self.parts or self.loss_scale is not None or self.objects is not None
        params = (
            [p for group in groups for p in group["params"] if p.grad is not None] if needs_gradients else []
        )
        grads = [param.grad for param in params if param.grad is not None]
        update = partial(self._update, **kwargs) if kwargs else self._update
        with torch.no_grad():
            if self.objects is not None:
                self.normalize(grads)
            self.logs, finite = finish(params, grads, self.parts, self.loss_scale, update)
            for part in self.parts:
                if "after_window" in part.implements:
                    part.after_window(finite)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients."""
        if kwargs or self.overrides_zero_grad:
            self.optimizer.zero_grad(**kwargs)
            return
        # Equivalent to the optimizer's zero_grad, but without a profiler record.
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context manager for the forward pass and loss of the next batch.

        It applies autocast and, unless the batch ends its accumulation window, `no_sync`.
        """
        for part in self.parts:
            # An own train_step may have several accumulation windows per batch.
            if part.nonfinite is not None:
                part.before_batch()
        window = self.accumulation
        if window.counts == 1 or window.ends_next or not hasattr(model, "no_sync"):
            return self.autocast()
        stack = ExitStack()
        stack.enter_context(model.no_sync())
        stack.enter_context(self.autocast())
        return stack

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for autocast, which has no effect if `dtype` is None."""
        if self.dtype is None:
            return _NO_CONTEXT
        return torch.autocast(self.device_type, dtype=self.dtype)

    @cached_property
    def device_type(self) -> str:
        """Device type of the parameters. The wrapper may be created before its model is moved to the device."""
        return next(self.parameters()).device.type

    # ---- accumulation ---------------------------------------------------------------------------

    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int, batches_per_epoch: int | None = None
    ) -> None:
        """Set the number of completed batches, the total number of batches (-1 if unknown), and the epoch's length.

        If no parameter has a gradient, the next batch is the first of its accumulation window.
        """
        self.accumulation.total, self.accumulation.batches_per_epoch = max_counts, batches_per_epoch
        self.batches = init_counts

    def should_update(self) -> bool:
        """Return whether the last counted batch ends an accumulation window."""
        return self.accumulation.ends(self.accumulation.count)

    def should_sync(self) -> bool:
        """Return whether the next batch ends its window, in which case backward must synchronize gradients."""
        return self.accumulation.ends_next

    def ends_window(self, count: int) -> bool:
        """Return whether batch number `count` (counted from 1) ends an accumulation window."""
        return self.accumulation.ends(count)

    def begins_window(self) -> bool:
        """Return whether the next batch is the first of its accumulation window."""
        return self.accumulation.unfinished == 0

    def resume_window(self, unfinished: int, window: int | None, ratio: float = 1.0) -> None:
        """Continue the unfinished accumulation window of a checkpoint, whose gradients have been loaded into `p.grad`.

        Each loss is divided by the number of batches in its window. If the window now has a different size, for
        example because `accumulative_counts` has changed, the gradients are scaled, so that the update uses the mean
        gradient of the window. Without gradients, the next batch is the first of a window.

        Args:
            unfinished: number of batches between the end of the last window and the checkpoint.
            window: number of batches in the whole window when the checkpoint was saved, or None if it is unknown.
            ratio: number of this wrapper's batches per batch in the checkpoint, if the batch size has changed.
        """
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        own = max(1, round(unfinished * ratio)) if unfinished and grads else 0
        self.accumulation.start = self.accumulation.count - own
        # The number of objects already weights batches by their size.
        weight = own if self.objects is None else unfinished
        scale = window / unfinished * weight / self.accumulation.size if own and window is not None else 1.0
        if scale != 1:
            for grad in grads:
                grad.mul_(scale)
        if self.objects is not None:
            self.objects[0] *= scale if own else 0

    @property
    def accumulative_counts(self) -> int:
        """Number of batches per optimizer step. If it changes, an unfinished window keeps its mean gradient.

        Raises:
            ConfigError: set within a window of a sharded model, whose gradients torch has not stored yet.
        """
        return self.accumulation.counts

    @accumulative_counts.setter
    def accumulative_counts(self, counts: int) -> None:
        check(counts, PositiveInt, "accumulative_counts")
        window, unfinished = self.accumulation.size, self.accumulation.unfinished
        if unfinished and all(param.grad is None for param in self.parameters()):
            raise ConfigError("can change only after the last batch of a window", "accumulative_counts")
        self.accumulation.counts = counts
        self.resume_window(unfinished, window)

    @property
    def batches(self) -> int:
        """Number of batches trained on, including those before resuming."""
        return self.accumulation.count

    @batches.setter
    def batches(self, count: int) -> None:
        self.accumulation.move_to(count, any(param.grad is not None for param in self.parameters()))

    _accumulative_counts, _inner_count = accumulative_counts, batches  # MMEngine's names

    # ---- optimizers with modes, such as schedule-free ones -------------------------------------------------

    def switch_mode(self, training: bool) -> None:
        """Call `train()` or `eval()` of an optimizer that has both; in evaluation mode, the weights are averages."""
        self.training = training
        for wrapper in self.values() if isinstance(self, OptimWrapperDict) else [self]:
            optimizer: Any = wrapper.optimizer
            if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
                optimizer.train() if training else optimizer.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager within which an optimizer with modes is in evaluation mode."""
        was_training = self.training
        if was_training:
            self.switch_mode(training=False)
        try:
            yield
        finally:
            if was_training:
                self.switch_mode(training=True)

    # ---- properties that compiled steps and checkpoints read --------------------------------------------

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """The object that stores the loss scale; always None in this class."""
        return None

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the gradients before clipping, in the last update; None without clipping by norm."""
        return self.logs.get("grad_norm")

    # ---- accessors ------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Default optimizer options."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rate of each group. Tensor learning rates may cause a device synchronization."""
        return {"lr": [float(group["lr"]) for group in self.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum or the first beta of each group, or 0 for groups that have neither."""
        values = (group.get("momentum", group.get("betas", (0.0,))) for group in self.param_groups)
        return {"momentum": [float(v[0] if isinstance(v, tuple | list) else v) for v in values]}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the optimizer's parameters."""
        return chain.from_iterable(map(itemgetter("params"), self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state and, if losses are weighted, the number of objects in the window."""
        weighted = {} if self.objects is None else {"objects": self.objects.clone()}
        return {**self.optimizer.state_dict(), **weighted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer state, and shard the states of sharded parameters."""
        params = dict(enumerate(self.parameters()))
        if any(is_sharded(param) for param in params.values()):
            state = {
                index: {name: shard_like(value, params.get(index)) for name, value in values.items()}
                for index, values in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": state}
        if (objects := state_dict.get("objects")) is not None:
            if self.objects is None:
                self.objects = torch.empty_like(objects, device=next(self.parameters()).device)
            self.objects.copy_(objects)  # a graph reads this tensor
        self.optimizer.load_state_dict(replace_kernel_options(self.optimizer, state_dict))
        lay_out_states(self.optimizer)
        self._update = EagerUpdate(self.optimizer)


class OptimWrapperDict(OptimWrapper):
    """A dict of `OptimWrapper` objects; the model's `train_step` accesses them by name (for example in GANs)."""

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ConfigError(f"must be an OptimWrapper, not {type(wrapper).__name__}", name)
        self.optim_wrappers = optim_wrappers
        self.logs, self.parts = {}, []
        self.accumulation = AccumulationWindow()  # each wrapper has its own windows

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        names = ", ".join(self.optim_wrappers)
        raise ModelError(
            f"there are several optimizers ({names}); override train_step(data, optim_wrapper) in the model, and call "
            "the methods of optim_wrapper[name] there"
        )

    update_params = backward = step = optim_context = _raise

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of all optimizers."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int, batches_per_epoch: int | None = None
    ) -> None:
        """Do nothing, because the model determines how often each optimizer steps."""

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
