"""Optimizers that are not in torch: RMSpropTF and BertAdam."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.registry import OPTIMIZERS
from slipstream.sharding import full_tensor

_Tensors = list[Tensor] | tuple[Tensor, ...]


class _Foreach(Optimizer):
    """Base class for optimizers that update all parameters of the same group and dtype together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure`, update all parameters that have a gradient, and return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for dtype in dict.fromkeys(p.dtype for p in params):
                self._update(group, [p for p in params if p.dtype == dtype])
            group["step"] = group.get("step", 0) + 1
        return loss

    def _update(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        """Update `params`, which belong to one group and have the same dtype."""
        raise NotImplementedError

    def _state(self, name: str, params: list[Tensor], start: float = 0.0) -> list[Tensor]:
        """Return the state `name` of each parameter, initially filled with `start`."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.full_like(p, start, memory_format=torch.preserve_format)
        return [self.state[p][name] for p in params]


@OPTIMIZERS.register_module()
class RMSpropTF(_Foreach):
    """TensorFlow's RMSprop: `eps` is inside the square root, and the mean squares start at one.

    `v += (1 - alpha) (g^2 - v)`, `u = g / sqrt(v + eps)`, and `p -= lr u` or, with momentum,
    `b = momentum b + lr u` and `p -= b`. Equivalent to torch_npu's `NpuFusedRMSpropTF`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        alpha: decay factor of the mean squares (`v`).
        eps: term added to the mean squares.
        weight_decay: weight decay coefficient; `weight_decay * p` is added to the gradient.
        momentum: decay factor of the momentum buffer (`b`).
        centered: whether to subtract the square of the mean gradient from the mean squares.
        decoupled_decay: whether to multiply the weights by `1 - weight_decay`, independently of `lr`, instead of
            changing the gradient.
        lr_in_momentum: whether to multiply `u` by `lr` before adding it to the momentum buffer; if False, the buffer is
            multiplied by `lr` in the update, as in torch.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
    ) -> None:
        numbers = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        flags = dict(centered=centered, decoupled_decay=decoupled_decay, lr_in_momentum=lr_in_momentum)
        super().__init__(params, {**numbers, **flags})

    def _update(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        grads: _Tensors = _gradients(params)
        if group["weight_decay"] and group["decoupled_decay"]:
            torch._foreach_mul_(params, 1 - group["weight_decay"])
        elif group["weight_decay"]:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        roots = self._root_mean_squares(group, params, grads)
        updates: _Tensors = torch._foreach_div(grads, roots)
        if not group["momentum"] or group["lr_in_momentum"]:
            torch._foreach_mul_(updates, group["lr"])
        if group["momentum"]:
            buffers = self._state("momentum_buffer", params)
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            updates = buffers if group["lr_in_momentum"] else torch._foreach_mul(buffers, group["lr"])
        torch._foreach_sub_(params, updates)

    def _root_mean_squares(self, group: Mapping[str, Any], params: list[Tensor], grads: _Tensors) -> _Tensors:
        squares = self._state("square_avg", params, 1.0)
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 1 - group["alpha"])
        roots = torch._foreach_add(squares, group["eps"])
        if group["centered"]:
            means = self._state("grad_avg", params)
            torch._foreach_lerp_(means, grads, 1 - group["alpha"])
            torch._foreach_addcmul_(roots, means, means, value=-1)
        torch._foreach_sqrt_(roots)
        return roots


# Learning rate factor after the fraction `x` of all steps, for `x >= warmup`.
_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": lambda x, warmup: 0.5 * (1 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: 1.0,
    "warmup_linear": lambda x, warmup: max((x - 1) / (warmup - 1), 0.0),
    "warmup_poly": lambda x, warmup: math.sqrt(max(1 - x, 0.0)),
}


@OPTIMIZERS.register_module()
class BertAdam(_Foreach):
    """The Adam variant of BERT (Devlin et al. 2019), without bias correction and with a built-in LR schedule.

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `p -= lr_t (m / (sqrt(v) + e) + weight_decay p)`.
    Equivalent to torch_npu's `NpuFusedBertAdam`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        warmup: fraction of `t_total` during which the learning rate increases from 0; -1 disables the warm-up. As in
            torch_npu, `warmup_linear` without a warm-up starts at half the learning rate.
        t_total: number of steps in the schedule; -1 means a constant learning rate.
        schedule: `warmup_linear`, `warmup_constant`, `warmup_cosine` or `warmup_poly`.
        b1: decay factor of the mean gradient (`m`).
        b2: decay factor of the mean squares (`v`).
        e: term added to the square root of the mean squares.
        weight_decay: weight decay coefficient; `weight_decay * p` is added to the update.
        max_grad_norm: maximum norm of the gradients of each group and dtype; 0 or a negative number disables clipping.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.999,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
    ) -> None:
        if not (0 <= warmup < 1 or warmup == -1):
            raise ConfigError(f"must be in [0, 1) or -1, not {warmup}", "warmup")
        if schedule not in _SCHEDULES:
            raise ConfigError(f"must be one of {', '.join(_SCHEDULES)}, not {schedule!r}", "schedule")
        options = dict(lr=lr, warmup=warmup, t_total=t_total, schedule=schedule, b1=b1, b2=b2, e=e)
        super().__init__(params, {**options, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm})

    def _update(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        grads: _Tensors = _gradients(params)
        if group["max_grad_norm"] > 0:
            norm = full_tensor(nn.utils.get_total_norm(grads))
            grads = torch._foreach_mul(grads, (group["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0))
        means, squares = self._state("exp_avg", params), self._state("exp_avg_sq", params)
        torch._foreach_lerp_(means, grads, 1 - group["b1"])
        torch._foreach_mul_(squares, group["b2"])
        torch._foreach_addcmul_(squares, grads, grads, value=1 - group["b2"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["e"])
        updates = torch._foreach_div(means, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        torch._foreach_mul_(updates, _scheduled_lr(group))
        torch._foreach_sub_(params, updates)


def _scheduled_lr(group: Mapping[str, Any]) -> Any:
    if group["t_total"] == -1:
        return group["lr"]
    progress, warmup = group.get("step", 0) / group["t_total"], group["warmup"]
    return group["lr"] * (
        progress / warmup if progress < warmup else _SCHEDULES[group["schedule"]](progress, warmup)
    )


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
