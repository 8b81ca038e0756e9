"""The training step of a small torch network, reimplemented with `jax.jit` and initialized with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

Params = list[dict[str, Any]]


def jax_step(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> Callable[[tuple[Any, Any]], Any]:
    """Return `step(batch) -> loss` (a JAX array): cross-entropy, backward, and SGD or AdamW, with donated buffers."""
    params = [_arrays(dict(layer.named_parameters())) for layer in net]
    buffers = [_arrays({k: v for k, v in layer.named_buffers() if v.is_floating_point()}) for layer in net]
    update = _adamw(optimizer) if isinstance(optimizer, torch.optim.AdamW) else _sgd(optimizer)

    def loss_fn(params: Params, buffers: Params, x: Any, y: Any) -> tuple[Any, Params]:
        new_buffers = []
        for layer, weights, layer_buffers in zip(net, params, buffers, strict=True):
            x, layer_buffers = _forward(layer, weights, layer_buffers, x)
            new_buffers.append(layer_buffers)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], axis=1)
        return -log_probs.mean(), new_buffers

    def step(state: Any, lr: Any, x: Any, y: Any) -> Any:
        params, buffers, moments = state
        (loss, buffers), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, buffers, x, y)
        params, moments = update(params, grads, moments, lr)
        return (params, buffers, moments), loss

    compiled = jax.jit(step, donate_argnums=0)
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    lr = jnp.float32(optimizer.param_groups[0]["lr"])  # passed as an argument, so a schedule can change it
    state: Any = (params, buffers, (jnp.float32(0), *zeros))

    def run(batch: tuple[Any, Any]) -> Any:
        nonlocal state
        state, loss = compiled(state, lr, *batch)
        return loss

    return run


def to_jax(tensor: Tensor) -> Any:
    """Return a copy of the tensor as a JAX array."""
    return jnp.asarray(np.array(tensor.detach().numpy()))


def _arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: to_jax(tensor) for name, tensor in tensors.items()}


def _forward(
    layer: nn.Module, weights: dict[str, Any], buffers: dict[str, Any], x: Any
) -> tuple[Any, dict[str, Any]]:
    match layer:
        case nn.Linear():
            return x @ weights["weight"].T + weights["bias"], buffers
        case nn.ReLU():
            return jax.nn.relu(x), buffers
        case nn.Conv2d():
            pads = [(p, p) for p in layer.padding]
            return jax.lax.conv_general_dilated(x, weights["weight"], layer.stride, pads), buffers
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return _batch_norm(layer, weights, buffers, x)
        case nn.AdaptiveAvgPool2d():
            return x.mean((2, 3), keepdims=True), buffers
        case nn.Flatten():
            return x.reshape(x.shape[0], -1), buffers
    raise NotImplementedError(
        f"jax_step does not support layers of type {type(layer).__name__}; add a case to _forward"
    )


def _batch_norm(
    layer: Any, weights: dict[str, Any], buffers: dict[str, Any], x: Any
) -> tuple[Any, dict[str, Any]]:
    dims = (0, *range(2, x.ndim))
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, var = x.mean(dims), x.var(dims)
    y = (x - mean.reshape(shape)) * jax.lax.rsqrt(var + layer.eps).reshape(shape)
    count, momentum = x.size // x.shape[1], layer.momentum
    new_buffers = {
        "running_mean": (1 - momentum) * buffers["running_mean"] + momentum * mean,
        "running_var": (1 - momentum) * buffers["running_var"] + momentum * var * count / (count - 1),
    }
    return y * weights["weight"].reshape(shape) + weights["bias"].reshape(shape), new_buffers


def _sgd(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    momentum = optimizer.param_groups[0]["momentum"]

    def update(params: Any, grads: Any, moments: Any, lr: Any) -> Any:
        count, velocity, unused = moments
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - lr * v, params, velocity), (count, velocity, unused)

    return update


def _adamw(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    group = optimizer.param_groups[0]
    (b1, b2), eps, decay = group["betas"], group["eps"], group["weight_decay"]

    def update(params: Any, grads: Any, moments: Any, lr: Any) -> Any:
        count, first, second = moments
        count = count + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, grads)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, grads)
        denominator_scale, step_size = jnp.sqrt(1 - b2**count), lr / (1 - b1**count)

        def update_param(p: Any, m: Any, v: Any) -> Any:
            return p * (1 - lr * decay) - step_size * m / (jnp.sqrt(v) / denominator_scale + eps)

        return jax.tree.map(update_param, params, first, second), (count, first, second)

    return update
