"""The optimizer wrapper, which runs backward passes, accumulates and clips gradients, and runs optimizer steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.config import options
from slipstream.errors import ConfigError, ModelError
from slipstream.logging import PhaseTimes
from slipstream.optim.kernels import FusedLayouts, lay_out_states, replace_kernel_options
from slipstream.registry import OPTIM_WRAPPERS
from slipstream.sharding import full_tensor, is_sharded, max_abs, shard_like
from slipstream.step.numerics import scale_
from slipstream.step.parts import StepPart, apply_update
from slipstream.typecheck import PositiveInt, Rule, check

__all__ = ["ClipGradients", "GradClip", "OptimWrapper", "OptimWrapperDict", "total_norm"]

_NO_CONTEXT = nullcontext()


_Limit = Annotated[float, Rule(lambda value: value > 0, "above 0")]
"""An infinite limit disables clipping, but the gradient norm is still logged."""


@dataclass(frozen=True)
class GradClip:
    """Gradient clipping options, for example `dict(max_norm=35, norm_type=2)` in a configuration."""

    type: Literal["norm", "value"] = "norm"
    max_norm: _Limit | None = None
    norm_type: _Limit = 2.0
    clip_value: _Limit | None = None

    @classmethod
    def from_dict(cls, cfg: Mapping[str, Any]) -> GradClip:
        """Parse `clip_grad`; type 'norm' requires `max_norm`, and type 'value' requires `clip_value`.

        Raises:
            ConfigError: a key is unknown, a value is invalid, or the limit is missing.
        """
        clip = options(cls, cfg, "clip_grad")
        name = "max_norm" if clip.type == "norm" else "clip_value"
        if getattr(clip, name) is None:
            raise ConfigError(f"type '{clip.type}' requires a positive {name}", "clip_grad")
        return clip


class ClipGradients(StepPart):
    """Clip the gradients by their total norm or by value before the update."""

    def __init__(self, options: GradClip) -> None:
        self.options = options

    def before_update(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> Mapping[str, Tensor]:
        """Clip in place; for type 'norm', return the norm before clipping as `grad_norm` (0-dim, on the device)."""
        options = self.options
        if options.type == "value":
            assert options.clip_value is not None
            torch._foreach_clamp_min_(grads, -options.clip_value)
            torch._foreach_clamp_max_(grads, options.clip_value)
            return {}
        assert options.max_norm is not None
        norm = total_norm(grads, options.norm_type)
        scale_(grads, (options.max_norm / (norm + 1e-6)).clamp(max=1.0))
        return {"grad_norm": norm}


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the total norm of all tensors (0-dim). For sharded tensors, this is the norm over all processes."""
    if math.isinf(norm_type) and any(map(is_sharded, tensors)):
        return max_abs(tensors)
    return full_tensor(nn.utils.get_total_norm(tensors, norm_type))


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
        self._lay_out = FusedLayouts(optimizer)
        self.clip_grad = GradClip.from_dict(clip_grad) if clip_grad else None
        self.parts: list[StepPart] = [ClipGradients(self.clip_grad)] if self.clip_grad else []
        """Step parts that eager and compiled steps run around each update, in list order."""
        self.on_gradients: Callable[[], None] | None = None
        """Called before each update, when `p.grad` contains the gradients of the whole accumulation window."""
        self.grad_norm: Tensor | None = None
        self.logs: Mapping[str, Tensor] = {}
        """Values to log, as returned by the parts in the last update."""
        self.guard: Any = None
        """Checks on the device whether the loss and gradients of a step are finite; None disables the check."""
        self.finite: Tensor | None = None
        """During an update that the guard checks, whether the gradients are finite (0-dim bool); otherwise None."""
        self.phases: PhaseTimes | None = None
        """Measures the host time of each phase of eager steps, if set."""
        self.batches_per_epoch: int | None = None
        """Number of batches per epoch if accumulation windows end at the end of each epoch; otherwise None."""
        self._accumulative_counts = accumulative_counts
        self._inner_count = 0
        self._max_counts = -1
        self._window_start = 0
        self._trains = False  # whether a backward pass has produced a gradient

    # ---- one step -------------------------------------------------------------------------------

    def update_params(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`; at the end of an accumulation window, update the weights.

        Args:
            loss: a scalar tensor.
            kwargs: arguments for `Tensor.backward`, for example `inputs`.
        """
        self.backward(self.scale_loss(loss), **kwargs)
        if self.should_update():
            self.update()

    def update(self) -> None:
        """Update the weights with the gradients of the accumulation window, and clear the gradients."""
        if self.on_gradients is not None:
            self.on_gradients()
        before = self.phases.current if self.phases is not None else None
        if self.phases is not None:
            self.phases.switch("optimizer")
        if self.guard is None:
            self.step()
        else:
            self.guard.step(self)
        self.zero_grad()
        if self.phases is not None and before is not None:
            self.phases.switch(before)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss by the number of batches in its accumulation window."""
        window = self.window
        return loss if window == 1 else loss / window

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass and count the batch."""
        self.backward_only(loss, **kwargs)
        self.count_batch()

    def backward_only(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward pass without counting the batch, for steps with several backward passes.

        Raises:
            ModelError: at the end of the first accumulation window, none of the optimizer's parameters has a gradient.
        """
        if self.guard is not None:
            loss = self.guard.poison(loss)
        self._amplify(loss).backward(**kwargs)
        # Before the last batch of a window, FSDP2 does not store the gradients in `p.grad`.
        if not self._trains and self.should_sync():
            self._check_any_gradient()

    def _check_any_gradient(self) -> None:
        # A hook may have used and cleared the gradient.
        if not any(p.grad is not None or p._post_accumulate_grad_hooks for p in self.parameters()):
            raise ModelError(
                "the loss does not depend on any of the optimizer's parameters; check that the model's outputs are not "
                "detached or computed under torch.no_grad(), and that the optimizer contains the model's parameters"
            )
        self._trains = True

    def _amplify(self, loss: Tensor) -> Tensor:
        """Return the loss for backward. A subclass may multiply it by a loss scale."""
        return loss

    def step(self, **kwargs: Any) -> None:
        """Run the optimizer step, and run `parts` before and after it."""
        self._apply_parts(lambda: self.optimizer.step(**kwargs), self.finite)

    def _apply_parts(self, step: Callable[[], Any], finite: Tensor | None) -> None:
        """Run `parts` before and after `step`, which runs the optimizer step; undo the parts if `finite` is False."""
        self._lay_out()
        params = [param for param in self.parameters() if param.grad is not None] if self.parts else []
        self.logs, self.grad_norm = {}, None
        if not params:
            step()
            return
        grads = [param.grad for param in params if param.grad is not None]
        with torch.no_grad():
            self.logs = apply_update(self.parts, params, grads, lambda _: step(), finite)
        self.grad_norm = self.logs.get("grad_norm")

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients."""
        if kwargs or self.overrides_zero_grad:
            self.optimizer.zero_grad(**kwargs)
            return
        # Equivalent to the optimizer's zero_grad, but without a profiler record.
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    # ---- accumulation ---------------------------------------------------------------------------

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set the number of completed batches and the total number of batches (-1 if unknown).

        If no parameter has a gradient, the next batch is the first of its accumulation window.
        """
        self._max_counts = max_counts
        self.batches = init_counts

    def should_update(self) -> bool:
        """Return whether the last counted batch ends an accumulation window."""
        return self.ends_window(self._inner_count)

    def should_sync(self) -> bool:
        """Return whether the next batch ends its window, in which case backward must synchronize gradients."""
        return self.ends_window(self._inner_count + 1)

    def begins_window(self) -> bool:
        """Return whether the next batch is the first of its accumulation window."""
        return self._inner_count == self._window_start

    def ends_window(self, count: int) -> bool:
        """Return whether batch number `count` (counted from 1) ends an accumulation window."""
        in_epoch = count % self.batches_per_epoch if self.batches_per_epoch else count
        return in_epoch % self._accumulative_counts == 0 or count == self._max_counts

    def count_batch(self) -> None:
        """Count a batch after its backward pass."""
        self._inner_count += 1
        if self.ends_window(self._inner_count):
            self._window_start = self._inner_count

    @property
    def unfinished(self) -> int:
        """Number of batches since the end of the last accumulation window.

        If a run ends with a smaller window and is then extended, the next window is also smaller than
        `accumulative_counts`. Therefore, this value cannot be inferred from the number of completed batches, and
        checkpoints contain it.
        """
        return self._inner_count - self._window_start

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
        self._window_start = self._inner_count - own
        scale = window / unfinished * own / self.window if own and window is not None else 1.0
        if scale != 1:
            for grad in grads:
                grad.mul_(scale)

    @property
    def window(self) -> int:
        """Number of batches in the accumulation window that contains the next batch."""
        counts, epoch = self._accumulative_counts, self.batches_per_epoch
        in_epoch = self._inner_count % epoch if epoch else self._inner_count
        first = self._inner_count - in_epoch  # the first batch of the epoch
        ends = [first + in_epoch - in_epoch % counts + counts]
        if epoch:
            ends.append(first + epoch)
        if self._max_counts > self._inner_count:
            ends.append(self._max_counts)
        return min(ends) - self._window_start

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context manager for the next batch: `no_sync`, or a null context at the end of a window."""
        if self.guard is not None:
            self.guard.before_forward()
        if self._accumulative_counts > 1 and not self.should_sync() and hasattr(model, "no_sync"):
            context: AbstractContextManager[Any] = model.no_sync()
            return context
        return _NO_CONTEXT

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for autocast, which has no effect in this class."""
        return _NO_CONTEXT

    # ---- properties that compiled steps, guards and checkpoints read ------------------------------------

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Loss scaler; always None in this class."""
        return None

    @property
    def adapts_scale(self) -> bool:
        """Whether overflows change the loss scale; always False in this class."""
        return False

    @property
    def overrides_zero_grad(self) -> bool:
        """Whether the optimizer overrides `zero_grad`, and may therefore set gradients to zero instead of None."""
        return getattr(self.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad

    @property
    def batches(self) -> int:
        """Number of batches trained on, including those before resuming."""
        return self._inner_count

    @batches.setter
    def batches(self, count: int) -> None:
        self._inner_count = self._window_start = count
        if not self.ends_window(count) and any(param.grad is not None for param in self.parameters()):
            in_epoch = count % self.batches_per_epoch if self.batches_per_epoch else count
            self._window_start = count - in_epoch % self._accumulative_counts

    # ---- accessors ------------------------------------------------------------------------------

    @property
    def accumulative_counts(self) -> int:
        """Number of batches per optimizer step."""
        return self._accumulative_counts

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
        """Return the optimizer state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer state, and shard the states of sharded parameters."""
        params = dict(enumerate(self.parameters()))
        if any(is_sharded(param) for param in params.values()):
            state = {
                index: {name: shard_like(value, params.get(index)) for name, value in values.items()}
                for index, values in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": state}
        self.optimizer.load_state_dict(replace_kernel_options(self.optimizer, state_dict))
        lay_out_states(self.optimizer)


class OptimWrapperDict(OptimWrapper):
    """A dict of `OptimWrapper` objects; the model's `train_step` accesses them by name (for example in GANs)."""

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ConfigError(f"must be an OptimWrapper, not {type(wrapper).__name__}", name)
        self.optim_wrappers = optim_wrappers
        self.grad_norm, self.logs = None, {}
        self.parts = []
        self.phases = None

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
