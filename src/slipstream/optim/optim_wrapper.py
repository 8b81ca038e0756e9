"""How weights move: backward, accumulation, clipping, the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.dist.sharding import is_sharded, largest, shard_like, whole
from slipstream.errors import ConfigError, LossError, ModelError, did_you_mean
from slipstream.optim.kernels import with_own_kernels
from slipstream.optim.layouts import lay_out_states
from slipstream.registry import OPTIM_WRAPPERS

__all__ = ["GradClip", "OptimWrapper"]

_NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class GradClip:
    """How gradients are clipped before a step; `dict(max_norm=35, norm_type=2)` in a configuration."""

    type: Literal["norm", "value"] = "norm"
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None

    @classmethod
    def from_dict(cls, cfg: Mapping[str, Any]) -> GradClip:
        """Read `clip_grad`; which limit is needed follows from `type`.

        Raises:
            ConfigError: an unknown key, or the limit is missing.
        """
        for key in cfg:
            if key not in cls.__dataclass_fields__:
                raise ConfigError(
                    f"no such option '{key}'{did_you_mean(key, cls.__dataclass_fields__)}", "clip_grad"
                )
        clip = cls(**cfg)
        if clip.type not in ("norm", "value"):
            raise ConfigError(f"type must be 'norm' or 'value', not {clip.type!r}", "clip_grad")
        limit = clip.max_norm if clip.type == "norm" else clip.clip_value
        if not isinstance(limit, int | float) or limit <= 0:
            name = "max_norm" if clip.type == "norm" else "clip_value"
            raise ConfigError(f"type '{clip.type}' needs a positive {name}, not {limit!r}", "clip_grad")
        return clip

    def __call__(self, params: list[nn.Parameter]) -> Tensor | None:
        """Clip the gradients in place; return their total norm before (0-dim, on the device) for type norm."""
        if self.type == "value":
            assert self.clip_value is not None
            nn.utils.clip_grad_value_(params, self.clip_value)
            return None
        assert self.max_norm is not None
        if not any(is_sharded(param.grad) for param in params):
            return nn.utils.clip_grad_norm_(params, self.max_norm, self.norm_type)
        grads = [param.grad for param in params if param.grad is not None]
        if math.isinf(self.norm_type):
            norm = largest(grads)
        else:
            norm = whole(nn.utils.get_total_norm(grads, self.norm_type))  # over all ranks, read by none
        nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        return norm

    def clipped(self, grads: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return clipped copies of unsharded gradients and their norm, as `__call__` does to those of parameters."""
        if self.type == "value":
            assert self.clip_value is not None
            return [grad.clamp(-self.clip_value, self.clip_value) for grad in grads], None
        assert self.max_norm is not None
        norm = nn.utils.get_total_norm(grads, self.norm_type)
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return [grad * factor.to(grad.dtype) for grad in grads], norm


class _Guard(Protocol):
    """Leaves out the steps whose loss or gradients are not finite, without a wait for the device."""

    def before_forward(self) -> None:
        """Remember what a forward changes."""

    def poison(self, loss: Tensor) -> Tensor:
        """Return the loss, whose gradients are NaN if it is not finite."""

    def step(self, optim: OptimWrapper) -> None:
        """Call `optim.step()` so that it has no effect if a gradient is not finite."""

    def settle(self, finite: Tensor) -> None:
        """End a step that was made elsewhere, without effect unless `finite`."""

    progress: Any
    """What it remembers between batches; settable, to go back."""


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """An optimizer with gradient accumulation and clipping; one `update_params(loss)` a step.

    Args:
        optimizer: a `torch.optim.Optimizer`.
        accumulative_counts: number of batches whose gradients make one optimizer step. Each loss is
            divided by the size of its window, so that the window's mean gradient is applied; the last
            window of a run may be smaller.
        clip_grad: options of `GradClip`, or None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if accumulative_counts < 1:
            raise ConfigError(f"must be at least 1, not {accumulative_counts}", "accumulative_counts")
        self.optimizer = optimizer
        self.clip_grad = GradClip.from_dict(clip_grad) if clip_grad else None
        self.grad_norm: Tensor | None = None
        self.guard: _Guard | None = None
        """Decides on the device whether a step is sound; None takes every step."""
        self._accumulative_counts = accumulative_counts
        self._inner_count = 0
        self._max_counts = -1

    # ---- one step -------------------------------------------------------------------------------

    def update_params(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; at the end of an accumulation window move the weights."""
        self.backward(self.scale_loss(loss))
        if self.should_update():
            if self.guard is None:
                self.step()
            else:
                self.guard.step(self)
            self.zero_grad()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss by the number of batches in its accumulation window."""
        window = self.window
        if window == 1:
            return loss
        check_loss(loss)
        return loss / window

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward and count the batch."""
        check_loss(loss)
        if self.guard is not None:
            loss = self.guard.poison(loss)
        self._amplify(loss).backward(**kwargs)
        self.count_batch()

    def _amplify(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward from."""
        return loss

    def step(self, **kwargs: Any) -> None:
        """Clip as configured and step the optimizer."""
        if self.clip_grad is not None:
            self._clip()
        self.optimizer.step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Drop the gradients."""
        if kwargs or type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad(**kwargs)
            return
        for group in self.optimizer.param_groups:  # what the optimizer does, without its profiler record
            for param in group["params"]:
                param.grad = None

    def _clip(self) -> None:
        assert self.clip_grad is not None
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = self.clip_grad(params) if params else None

    # ---- accumulation ---------------------------------------------------------------------------

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Tell the wrapper how many batches are done and how many there will be (-1: unknown)."""
        self._inner_count = init_counts
        self._max_counts = max_counts

    def should_update(self) -> bool:
        """Say whether the batch just counted ends an accumulation window."""
        return self._ends_window(self._inner_count)

    def should_sync(self) -> bool:
        """Say whether the coming batch ends its window, so that its backward must sync gradients."""
        return self._ends_window(self._inner_count + 1)

    def _ends_window(self, count: int) -> bool:
        return count % self._accumulative_counts == 0 or count == self._max_counts

    def count_batch(self) -> None:
        """Count a batch whose gradients are there."""
        self._inner_count += 1

    @property
    def window(self) -> int:
        """Number of batches in the accumulation window of the coming batch."""
        counts = self._accumulative_counts
        remainder = self._max_counts % counts if self._max_counts > 0 else 0
        in_last = remainder and self._inner_count >= self._max_counts - remainder
        return remainder if in_last else counts

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context of forward and backward: no gradient sync inside an accumulation window."""
        if self.guard is not None:
            self.guard.before_forward()
        if self._accumulative_counts > 1 and not self.should_sync() and hasattr(model, "no_sync"):
            context: AbstractContextManager[Any] = model.no_sync()
            return context
        return _NO_CONTEXT

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision of forward and loss alone."""
        return _NO_CONTEXT

    # ---- for a step that does these things itself ------------------------------------------------------

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale, if there is one."""
        return None

    @property
    def adapts_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return False

    @property
    def progress(self) -> Any:
        """What the wrapper itself remembers between batches; settable, to go back."""
        return self._inner_count, self.grad_norm, None if self.guard is None else self.guard.progress

    @progress.setter
    def progress(self, value: Any) -> None:
        self._inner_count, self.grad_norm, guarded = value
        if self.guard is not None:
            self.guard.progress = guarded

    # ---- what others read -----------------------------------------------------------------------

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
        """The optimizer's default options."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rate of each group (reads the device if they are tensors)."""
        return {"lr": [float(group["lr"]) for group in self.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return each group's momentum, or its first beta; 0 for optimizers without."""
        values = (group.get("momentum", group.get("betas", (0.0,))) for group in self.param_groups)
        return {"momentum": [float(v[0] if isinstance(v, tuple | list) else v) for v in values]}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that the optimizer moves."""
        return (p for group in self.param_groups for p in group["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer's state, sharded where its parameters are."""
        params = dict(enumerate(self.parameters()))
        if any(is_sharded(param) for param in params.values()):
            state = {
                index: {name: shard_like(value, params.get(index)) for name, value in values.items()}
                for index, values in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": state}
        self.optimizer.load_state_dict(with_own_kernels(self.optimizer, state_dict))
        lay_out_states(self.optimizer)

    def __repr__(self) -> str:
        extra = f", clip_grad={self.clip_grad}" if self.clip_grad else ""
        name = type(self.optimizer).__name__
        return f"{type(self).__name__}({name}, accumulative_counts={self._accumulative_counts}{extra})"


def check_loss(loss: Any) -> None:
    """Raise if `loss` is nothing to run backward from.

    Raises:
        LossError: not a tensor, or not a scalar.
        ModelError: it depends on no trainable parameter.
    """
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss must be a tensor, not {type(loss).__name__}")
    if loss.ndim and loss.numel() != 1:
        shape = tuple(loss.shape)
        raise LossError(f"the loss must be a scalar, but has the shape {shape}: take its mean() or sum()")
    if not loss.requires_grad:
        raise ModelError(
            "the loss depends on no trainable parameter: is every parameter frozen (requires_grad=False), "
            "or the loss detached or computed under torch.no_grad()?"
        )


def device_of(optimizer: Optimizer) -> torch.device:
    """Return the device of the optimizer's first parameter."""
    device: torch.device = next(p.device for group in optimizer.param_groups for p in group["params"])
    return device
