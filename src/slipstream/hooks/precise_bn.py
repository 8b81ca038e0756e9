"""BatchNorm statistics that are means over many samples, not moving averages over the last few batches."""

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
from slipstream.errors import ConfigError, ModelError
from slipstream.hooks.ema import as_validated
from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["PreciseBNHook"]


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Recompute the running statistics of BatchNorm after an epoch, before it is saved and validated.

    They become mean and variance of all values that `num_samples` training samples bring to the layer, from the
    batches' own by the law of total variance (Wu and Johnson 2021, arXiv 2105.07576, section 3). The weights are those
    that are validated: of a run with an `EMAHook`, the average's. Each rank takes its share of the samples. The
    training goes on as if nothing had been computed: same batches, same random numbers, same other buffers.

    Layers with `momentum=None` keep their statistics, which are means over all batches already, and so do
    layers that are frozen in evaluation mode. The forward passes run eagerly, also of a compiled model.

    Args:
        num_samples: how many, over all ranks; at most those of an epoch. Some thousand are enough.
        interval: epochs between two times; the last epoch's are always recomputed.
    """

    priority = "BELOW_NORMAL"

    def __init__(self, num_samples: int, interval: int = 1) -> None:
        for name, value in (("num_samples", num_samples), ("interval", interval)):
            if value < 1:
                raise ConfigError(f"must be at least 1, not {value}", name)
        self.num_samples, self.interval = num_samples, interval

    def before_train(self, runner: Runner) -> None:
        """Find the layers."""
        if not runner.by_epoch:
            raise self.wrong("counts epochs, but the training counts iterations", "interval")
        model: Any = unwrap_model(runner.model)
        if not _layers(model):
            runner.logger.warning(
                "PreciseBNHook: no BatchNorm of the model has a moving average: nothing to do"
            )
        elif not hasattr(model, "loss_step"):
            raise ModelError(
                "PreciseBNHook needs a model with a loss_step(batch), as slipstream.model.BaseModel has"
            )

    def after_train_epoch(self, runner: Runner) -> None:
        """Recompute the statistics."""
        if not self.every_n_epochs(runner, self.interval) and not self.is_last_train_epoch(runner):
            return
        with as_validated(runner) as model:
            layers = [layer for layer in _layers(model) if layer.training]
            if layers:
                self._recompute(runner, model, layers)

    def _recompute(self, runner: Runner, model: Any, layers: list[_BatchNorm]) -> None:
        assert runner.optim_wrapper is not None, "a training has one"
        batches = min(math.ceil(self.num_samples / runner.samples_per_step), runner.train_loop.epoch_length)
        with _undisturbed(runner, model), _listening(layers) as moments:
            for batch in islice(runner.train_dataloader, batches):
                with runner.optim_wrapper.autocast():
                    model.loss_step(batch)
        for layer, own in zip(layers, _merged(moments), strict=True):
            if own.count:  # else no sample passed the layer
                layer.running_mean.copy_(own.mean)  # type: ignore[union-attr]
                layer.running_var.copy_(own.var)  # type: ignore[union-attr]


def _layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers whose running statistics are moving averages."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if norm.running_mean is not None and norm.momentum is not None]


@contextmanager
def _undisturbed(runner: Runner, model: nn.Module) -> Iterator[None]:
    """Inside the block the epoch's batches come once more; after it, nothing shows that they did."""
    loader = runner.train_dataloader
    random_state = get_random_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    drawn = None if loader.generator is None else loader.generator.get_state()
    try:
        # The compiled forward knows nothing of the listeners, and would be compiled anew for them.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        if drawn is not None:
            loader.generator.set_state(drawn)
        set_random_state(random_state)


class _Moments:
    """Count, mean and variance of all values of each channel, batch after batch, on the device."""

    def __init__(self, layer: _BatchNorm) -> None:
        like: Any = layer.running_mean
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.count = 0
        self.mean, self.var = torch.zeros_like(like, dtype=dtype), torch.zeros_like(like, dtype=dtype)

    def add(self, values: Tensor) -> None:
        """Take in a layer's input (N, C, ...), by the law of total variance: within the parts, and between them."""
        count = values.numel() // values.shape[1]
        if not count:
            return
        var, mean = torch.var_mean(values.to(self.mean.dtype), [0, *range(2, values.ndim)], correction=0)
        self.count += count
        share = count / self.count
        between = share * (1 - share) * (mean - self.mean).square()
        self.var = torch.lerp(self.var, var, share) + between
        self.mean = torch.lerp(self.mean, mean, share)


@contextmanager
def _listening(layers: list[_BatchNorm]) -> Iterator[list[_Moments]]:
    """Give the moments of what passes the layers inside the block."""
    moments = [_Moments(layer) for layer in layers]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, own=own: own.add(inputs[0].detach()))
        for layer, own in zip(layers, moments, strict=True)
    ]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def _merged(moments: list[_Moments]) -> list[_Moments]:
    """Give every rank the moments over all ranks, in two messages; the same law as over batches."""
    counts = torch.tensor(all_gather_object([own.count for own in moments])).sum(0).tolist()
    shares = [own.count / max(total, 1) for own, total in zip(moments, counts, strict=True)]
    sizes = [len(own.mean) for own in moments]
    means = torch.cat([own.mean * share for own, share in zip(moments, shares, strict=True)])
    all_reduce(means)
    variances = torch.cat(
        [
            (own.var + (own.mean - mean).square()) * share
            for own, mean, share in zip(moments, means.split(sizes), shares, strict=True)
        ]
    )
    all_reduce(variances)
    for own, mean, var, total in zip(
        moments, means.split(sizes), variances.split(sizes), counts, strict=True
    ):
        own.count, own.mean, own.var = total, mean, var
    return moments
