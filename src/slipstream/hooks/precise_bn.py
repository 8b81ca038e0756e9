"""Recompute BatchNorm statistics as means over many samples instead of moving averages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.checkpoint import get_random_state, set_random_state
from slipstream.dist import all_gather_object, all_reduce
from slipstream.errors import ModelError
from slipstream.hooks.ema import validation_weights
from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.registry import HOOKS
from slipstream.typecheck import PositiveInt, check

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Recompute the running statistics of BatchNorm after an epoch, before the model is saved and validated.

    The new statistics are the mean and variance of the layer's inputs over `num_samples` training samples, computed
    from the batch statistics using the law of total variance (Wu and Johnson 2021, arXiv 2105.07576, section 3). The
    hook uses the validation weights, which are the EMA weights if there is an `EMAHook`. The samples are split across
    the ranks. The hook does not affect training: it restores the random number generators and all other buffers.

    Layers with `momentum=None` keep their statistics, which are already means over all batches. Layers frozen in
    evaluation mode also keep their statistics. The forward passes run in eager mode, even if the model is compiled.

    Args:
        num_samples: number of samples across all ranks, limited to one epoch. A few thousand samples are enough.
        interval: number of epochs between recomputations; the hook always runs after the last epoch.
    """

    priority = "BELOW_NORMAL"

    def __init__(self, num_samples: PositiveInt, interval: PositiveInt = 1) -> None:
        for name, value in (("num_samples", num_samples), ("interval", interval)):
            check(value, PositiveInt, name)
        self.num_samples, self.interval = num_samples, interval

    def before_train(self, runner: Runner) -> None:
        """Check that the hook supports the model and the training loop."""
        if not runner.by_epoch:
            raise self.config_error(
                "counts epochs, but training is iteration-based; remove PreciseBNHook or use epoch-based training",
                "interval",
            )
        model: Any = unwrap_model(runner.model)
        if not _layers(model):
            runner.logger.warning(
                "PreciseBNHook: the model has no BatchNorm layer with a moving average; the hook has no effect"
            )
        elif runner.interface.loss_step is None:
            raise ModelError(
                "PreciseBNHook requires a model with a loss_step(batch) method; subclass slipstream.model.BaseModel"
            )

    def after_train_epoch(self, runner: Runner) -> None:
        """Recompute the statistics."""
        if not self.every_n_epochs(runner, self.interval) and not self.is_last_train_epoch(runner):
            return
        with validation_weights(runner) as model:
            layers = [layer for layer in _layers(model) if layer.training]
            if layers:
                self._recompute(runner, model, layers)

    def _recompute(self, runner: Runner, model: Any, layers: list[_BatchNorm]) -> None:
        assert runner.optim_wrapper is not None, "training requires an optimizer wrapper"
        loss_step = runner.interface.loss_step
        assert loss_step is not None, "checked in before_train"
        batches = math.ceil(self.num_samples / runner.samples_per_step)
        batches = min(batches, runner.train_loop.epoch_length or batches)
        with _preserve_state(runner, model), _record_moments(layers) as moments:
            for batch in islice(runner.train_dataloader, batches):
                with runner.optim_wrapper.autocast():
                    loss_step(batch)
        for layer, layer_moments in zip(layers, _merge(moments), strict=True):
            if layer_moments.count:  # 0 if no sample has passed through the layer
                layer.running_mean.copy_(layer_moments.mean)  # type: ignore[union-attr]
                layer.running_var.copy_(layer_moments.var)  # type: ignore[union-attr]


def _layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers whose running statistics are moving averages."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if norm.running_mean is not None and norm.momentum is not None]


@contextmanager
def _preserve_state(runner: Runner, model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and all random number generator states after the `with` block."""
    loader = runner.train_dataloader
    random_state = get_random_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    generator_state = None if loader.generator is None else loader.generator.get_state()
    try:
        # Forward pre-hooks would cause a compiled model to be recompiled, so disable compilation.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for buffer, original in buffers:
            buffer.copy_(original)
        if generator_state is not None:
            loader.generator.set_state(generator_state)
        set_random_state(random_state)


class _Moments:
    """Per-channel count, mean and variance of all values, accumulated on the device."""

    def __init__(self, layer: _BatchNorm) -> None:
        running_mean: Any = layer.running_mean
        dtype = torch.promote_types(running_mean.dtype, torch.float32)
        self.count = 0
        self.mean = torch.zeros_like(running_mean, dtype=dtype)
        self.var = self.mean.clone()

    def add(self, values: Tensor) -> None:
        """Add a layer's input (N, C, ...). The variance is the sum of the variances within and between batches."""
        count = values.numel() // values.shape[1]
        if not count:
            return
        var, mean = torch.var_mean(values.to(self.mean.dtype), [0, *range(2, values.ndim)], correction=0)
        self.count += count
        weight = count / self.count
        between = weight * (1 - weight) * (mean - self.mean).square()
        self.var = torch.lerp(self.var, var, weight) + between
        self.mean = torch.lerp(self.mean, mean, weight)


@contextmanager
def _record_moments(layers: list[_BatchNorm]) -> Iterator[list[_Moments]]:
    """Yield one `_Moments` per layer, which is updated with the layer's inputs inside the `with` block."""
    moments = [_Moments(layer) for layer in layers]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, stats=stats: stats.add(inputs[0].detach()))
        for layer, stats in zip(layers, moments, strict=True)
    ]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def _merge(moments: list[_Moments]) -> list[_Moments]:
    """Return the moments over all ranks, merged with two all-reduces using the law of total variance."""
    counts = torch.tensor(all_gather_object([stats.count for stats in moments])).sum(0).tolist()
    weights = [stats.count / max(total, 1) for stats, total in zip(moments, counts, strict=True)]
    sizes = [len(stats.mean) for stats in moments]
    means = torch.cat([stats.mean * weight for stats, weight in zip(moments, weights, strict=True)])
    all_reduce(means)
    variances = torch.cat(
        [
            (stats.var + (stats.mean - mean).square()) * weight
            for stats, mean, weight in zip(moments, means.split(sizes), weights, strict=True)
        ]
    )
    all_reduce(variances)
    for stats, mean, var, total in zip(
        moments, means.split(sizes), variances.split(sizes), counts, strict=True
    ):
        stats.count, stats.mean, stats.var = total, mean, var
    return moments
