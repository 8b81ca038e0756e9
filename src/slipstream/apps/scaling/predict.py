"""Predict step times, memory and the best strategy for a network on a cluster."""

from __future__ import annotations

from statistics import NormalDist

from slipstream.apps.scaling.model_profile import Cluster, Model, Prediction, Strategy
from slipstream.apps.scaling.simulate import Work, shards, simulate, units
from slipstream.errors import ConfigError

__all__ = ["best", "estimate_work", "expected_maximum", "memory_per_gpu", "predict"]


def predict(
    model: Model, cluster: Cluster, strategy: Strategy, batch: int, step_time: float | None = None
) -> Prediction:
    """Return the predicted time and memory of a step.

    Args:
        model: the network.
        cluster: the hardware.
        strategy: the parallel strategy.
        batch: number of samples per GPU.
        step_time: measured step time in seconds, on one GPU with this batch size. The estimated compute times of the
            blocks are scaled to this total.
    """
    work = estimate_work(model, cluster, strategy, batch, step_time)
    schedule = simulate(model, cluster, strategy, work)
    return Prediction(
        strategy,
        cluster,
        batch,
        compute=work.seconds,
        exposed=max(0.0, schedule.now - work.seconds),
        waiting=expected_maximum(cluster.gpus) * strategy.noise * work.seconds,
        sent=sum(event.sent for event in schedule.events),
        memory=memory_per_gpu(model, cluster, strategy, batch),
    )


def best(predictions: list[Prediction]) -> Prediction:
    """Return the fastest prediction that fits in memory. If none fits, return the one that needs the least memory."""
    fitting = [p for p in predictions if p.fits]
    return min(fitting, key=lambda p: p.step_time) if fitting else min(predictions, key=lambda p: p.memory)


def estimate_work(
    model: Model, cluster: Cluster, strategy: Strategy, batch: int, step_time: float | None = None
) -> Work:
    """Return the compute times of the blocks and of the optimizer.

    The time of a block is the time to compute its FLOPs or the time to transfer its data, whichever is longer (the
    roofline model of Williams, Waterman and Patterson 2009). The forward pass writes and reads each saved element once.
    The backward pass has twice the FLOPs and twice the memory traffic. The optimizer is memory-bound: it reads and
    writes parameters and state, and reads gradients.

    Raises:
        ConfigError: if the step time is not a positive number.
    """
    forward = []
    for block in model.blocks:
        traffic = 2 * batch * block.activations * strategy.activation_bytes
        traffic += block.parameters * strategy.parameter_bytes
        forward.append(max(batch * block.flops / cluster.flops, traffic / cluster.memory_bandwidth))
    owned = model.parameters / shards(cluster, strategy)
    optimizer = owned * (4 + 4 + 4 + 2 * strategy.state_bytes) / cluster.memory_bandwidth
    work = Work(forward, [2 * seconds for seconds in forward], optimizer)
    if step_time is None:
        return work
    if not step_time > 0:
        raise ConfigError(f"the measured step time must be a positive number of seconds, not {step_time}")
    single_gpu_time = 3 * sum(forward) + optimizer * model.parameters / owned
    factor = step_time / single_gpu_time
    return Work([factor * s for s in forward], [factor * s for s in work.backward], factor * optimizer)


def memory_per_gpu(model: Model, cluster: Cluster, strategy: Strategy, batch: int) -> float:
    """Return the memory used per GPU in bytes (Rajbhandari et al. 2020): parameters, gradients, state and activations.

    Sharded strategies partition parameters, gradients and state, and also store the two largest units unsharded, for
    gathers and reductions. DDP stores a second copy of the parameters if the forward pass uses a lower precision than
    float32.
    """
    activations = batch * model.activations * strategy.activation_bytes
    sharded = model.parameters * (4 + 4 + strategy.state_bytes) / shards(cluster, strategy)
    if strategy.kind == "ddp":
        cast = strategy.parameter_bytes * model.parameters if strategy.parameter_bytes < 4 else 0
        return sharded + cast + activations
    sizes = [
        sum(model.blocks[i].parameters for i in unit)
        for unit in units(model.blocks, strategy.unit_parameters)
    ]
    unsharded = sum(sorted(sizes)[-2:]) * (strategy.parameter_bytes + strategy.gradient_bytes)
    return sharded + unsharded + activations


def expected_maximum(n: int) -> float:
    """Return the expected maximum of `n` samples from a standard normal distribution.

    This is Blom's approximation (1958) of the largest order statistic: the quantile (n - 3/8) / (n + 1/4).
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
