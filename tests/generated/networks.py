"""The networks of the generated programs: stacks of small layers, many of which have side effects.

Every layer maps a tensor to one of the same shape, with the channels (of which there are `WIDTH`) in dimension 1.
"""

import collections
import logging
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, OUTPUTS = 8, 3
_LOG = logging.getLogger("generated")
_LOG.propagate = False


def _like(values, x):
    """Return the values of the channels in a shape that broadcasts against `x`."""
    return values.view(-1, *[1] * (x.ndim - 2))


def _means(x):
    return x.detach().transpose(0, 1).flatten(1).mean(1)


def _mixing(image, bias=True):
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bias) if image else nn.Linear(WIDTH, WIDTH, bias=bias)


class Layer(nn.Module):
    def __init__(self, image):
        super().__init__()
        self.image = image
        self.build()

    def build(self):
        pass


def _plain(function):
    """Return a layer without state whose forward pass is `function(self, x)`."""
    return type(function.__name__, (Layer,), {"forward": function})


class Mix(Layer):
    def build(self):
        self.mix = _mixing(self.image)

    def forward(self, x):
        return torch.tanh(self.mix(x))


class Summed(Layer):
    """Two parameters that are added, and therefore have the same gradient."""

    def build(self):
        self.a, self.b = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x + _like(self.a + self.b, x)


class Lazy(Layer):
    def build(self):
        self.mix = nn.LazyConv2d(WIDTH, 1) if self.image else nn.LazyLinear(WIDTH)

    def forward(self, x):
        return torch.tanh(self.mix(x))


class Shared(Mix):
    def forward(self, x):
        return torch.tanh(self.mix(torch.tanh(self.mix(x))))


class Tied(Layer):
    """Two layers that own the same parameter."""

    def build(self):
        self.one, self.two = _mixing(self.image), _mixing(self.image)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.sigmoid(self.one(x)))


class Unused(Mix):
    """A layer and a parameter that the forward pass never uses."""

    def build(self):
        super().build()
        self.never, self.scale = _mixing(self.image), nn.Parameter(torch.ones(()))


class UnusedOutput(Mix):
    """A head whose output the loss does not use, with a dropout."""

    def build(self):
        super().build()
        self.side = nn.Sequential(_mixing(self.image), nn.Dropout(0.5))

    def forward(self, x):
        self.side(x)
        return super().forward(x)


class Frozen(Mix):
    def build(self):
        super().build()
        self.mix.requires_grad_(False)


class Counter(Layer):
    """A number of calls in a buffer."""

    def build(self):
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * (self.calls % 3).to(x.dtype))


class PythonCounter(Layer):
    def build(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * (self.calls % 3))


class Decaying(Layer):
    """A time that forward changes and that backward needs."""

    def build(self):
        self.register_buffer("t", torch.zeros(()))

    def forward(self, x):
        y = x * torch.exp(-0.1 * self.t)
        self.t += 1
        return y


class Deque(Layer):
    def build(self):
        self.history = collections.deque(maxlen=3)

    def forward(self, x):
        self.history.append(x.detach().mean())
        return x - sum(self.history) / len(self.history)


class DequeProduct(Deque):
    """Python state that forward changes and that backward needs."""

    def forward(self, x):
        self.history.append(x.detach().std())
        return x * (sum(self.history) / len(self.history))


class History(Layer):
    """A list of Python numbers that grows."""

    def build(self):
        self.means = []

    def forward(self, x):
        self.means.append(float(x.detach().mean()))
        return x * (1 + 0.01 * self.means[-1])


class Branch(Layer):
    """Control flow that depends on the data."""

    def build(self):
        self.one, self.two = _mixing(self.image), _mixing(self.image)

    def forward(self, x):
        if x.detach().mean() > 0:
            return torch.tanh(self.one(x))
        return torch.tanh(self.two(x) + self.one(x))


class RandomDepth(Mix):
    def forward(self, x):
        if self.training and random.random() < 0.3:
            return x
        return super().forward(x)


class Dropout(Layer):
    def build(self):
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(x)


class RunningMean(Layer):
    """A moving average in forward, in place."""

    def build(self):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(_means(x), alpha=0.1)
        return x - _like(self.mean, x)


class AssignedMean(RunningMean):
    """A moving average that is assigned to the buffer."""

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * _means(x)
        return x * (1 + _like(self.mean, x))


class SharedMemory(Layer):
    """Buffers that share memory."""

    def build(self):
        whole = torch.zeros(2, WIDTH)
        self.register_buffer("whole", whole)
        self.register_buffer("row", whole[0])

    def forward(self, x):
        with torch.no_grad():
            self.row.add_(_means(x), alpha=0.1)
            self.whole[1].add_(0.01)
        return x + _like(self.whole.sum(0), x)


class Expanded(Layer):
    """A buffer that is expanded, and one that is not saved."""

    def build(self):
        self.register_buffer("ones", torch.ones(1).expand(WIDTH))
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.steps += 1
        return x * _like(self.ones, x) * (1 + 0.05 * torch.cos(self.steps))


class Checkpointed(Layer):
    """The user's own activation checkpointing, around BatchNorm and dropout."""

    reentrant = False

    def build(self):
        norm = nn.BatchNorm2d if self.image else nn.BatchNorm1d
        self.inner = nn.Sequential(_mixing(self.image), norm(WIDTH), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class FullPrecision(Mix):
    """A region without autocast."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(next(self.parameters()).dtype))


class InnerGradient(Mix):
    """A forward pass that contains a gradient, as in models of energies and forces."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class WeightHook(Mix):
    """A hook on a parameter."""

    def build(self):
        super().build()
        self.mix.weight.register_hook(lambda grad: grad * 0.5)


class ForwardHooks(Mix):
    def build(self):
        super().build()
        self.mix.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        self.mix.register_forward_hook(lambda module, args, output: output * 0.9)


class BackwardHook(Mix):
    def build(self):
        super().build()
        self.mix.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


class Spectral(Layer):
    wrap = staticmethod(nn.utils.parametrizations.spectral_norm)

    def build(self):
        self.mix = self.wrap(_mixing(self.image))

    def forward(self, x):
        return torch.tanh(self.mix(x))


class OldSpectral(Spectral):
    wrap = staticmethod(nn.utils.spectral_norm)


class WeightNorm(Spectral):
    wrap = staticmethod(nn.utils.parametrizations.weight_norm)


class Norm(Layer):
    momentum = 0.1

    def build(self):
        kind = nn.BatchNorm2d if self.image else nn.BatchNorm1d
        self.norm = nn.Sequential(_mixing(self.image, False), kind(WIDTH, momentum=self.momentum))

    def forward(self, x):
        return torch.relu(self.norm(x))


class CumulativeNorm(Norm):
    momentum = None


class GroupNorm(Layer):
    def build(self):
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        return F.silu(self.norm(x))


class Attention(Layer):
    """Attention over two tokens of four channels, or over the pixels."""

    def build(self):
        size = WIDTH if self.image else 4
        self.project, self.norm = nn.Linear(size, 3 * size), nn.LayerNorm(size)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2) if self.image else x.reshape(-1, 2, 4)
        q, k, v = self.project(self.norm(tokens)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(x.shape) if self.image else y.reshape(x.shape)


class HeadedAttention(Layer):
    def build(self):
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2) if self.image else x[:, None]
        y = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return y.transpose(1, 2).reshape(x.shape)


class Recurrent(Layer):
    def build(self):
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        y, _ = self.cell(x.flatten(2).transpose(1, 2) if self.image else x[:, None])
        return y.transpose(1, 2).reshape(x.shape)


class Embedded(Layer):
    def build(self):
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, x):
        rows = self.table(((_per_sample(x) + 2) * 2).clamp(0, 8).long())
        return x + rows.view(*rows.shape, *[1] * (x.ndim - 2))


class Codebook(Layer):
    """A vector-quantized layer whose codes are moving averages of the inputs."""

    def build(self):
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x):
        flat = x.transpose(1, -1).reshape(-1, WIDTH)
        index = torch.cdist(flat.detach().to(self.codes.dtype), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(index, 4).to(self.codes.dtype)
                sums = hits.t() @ flat.detach().to(self.codes.dtype)
                self.codes.lerp_(sums / hits.sum(0).clamp(min=1)[:, None], 0.1)
        codes = self.codes[index].view_as(x.transpose(1, -1)).transpose(1, -1)
        return x + (codes - x).detach()


def _per_sample(x):
    return x.detach().flatten(1).mean(1)


@_plain
def HostNumber(self, x):  # noqa: N802
    return x * (1 + 0.1 * min(x.detach().abs().max().item(), 1.0))


@_plain
def Logging(self, x):  # noqa: N802
    _LOG.warning("shape %s", tuple(x.shape))
    return x * 1.1


@_plain
def NumpyNoise(self, x):  # noqa: N802
    return x * (1 + 0.1 * np.random.rand()) if self.training else x


@_plain
def TorchNoise(self, x):  # noqa: N802
    return x + 0.1 * torch.randn_like(x) * torch.rand(()).to(x.dtype) if self.training else x


@_plain
def UnusedRandom(self, x):  # noqa: N802
    torch.rand(3)
    return torch.sin(x)


@_plain
def Inference(self, x):  # noqa: N802
    with torch.inference_mode():
        mean = x.detach().mean()
    return x + 0.1 * mean


@_plain
def StraightThrough(self, x):  # noqa: N802
    return _Straight.apply(x)


@_plain
def TensorHook(self, x):  # noqa: N802
    y = torch.sin(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return y


@_plain
def InPlace(self, x):  # noqa: N802
    y = x * 1.0
    y.mul_(1.2).clamp_(-2, 2)
    return F.leaky_relu(y, 0.2, inplace=True)


LAYERS = {
    kind.__name__: kind
    for kind in (
        Mix, Summed, Shared, Tied, Unused, UnusedOutput, Frozen, Counter, PythonCounter, Decaying, Deque,
        DequeProduct, History, HostNumber, Logging, Branch, RandomDepth, NumpyNoise, TorchNoise, UnusedRandom,
        Dropout, RunningMean, AssignedMean, SharedMemory, Expanded, Checkpointed, ReentrantCheckpointed,
        FullPrecision, InnerGradient, Inference, StraightThrough, WeightHook, TensorHook, ForwardHooks,
        BackwardHook, Spectral, OldSpectral, WeightNorm, InPlace, Norm, CumulativeNorm, GroupNorm, Attention,
        HeadedAttention, Recurrent, Embedded, Codebook, Lazy,
    )
}  # fmt: skip
PYTHON_STATE = {"PythonCounter", "Deque", "DequeProduct", "History", "NumpyNoise", "RandomDepth"}
"""Layers with side effects that `activation_checkpointing` repeats, as its page says."""
HOOKED = {"TensorHook", "BackwardHook", "ForwardHooks", "ReentrantCheckpointed", "Checkpointed"}
RANDOM = {"RandomDepth", "NumpyNoise", "TorchNoise", "UnusedRandom", "Dropout", "UnusedOutput", "HeadedAttention",
          "Checkpointed", "ReentrantCheckpointed"}  # fmt: skip
"""Layers that draw random numbers, which differ between float32 and float64."""
DISCONTINUOUS = {"Branch", "StraightThrough", "Embedded", "Codebook"}
UNTRAINED = {"Unused", "UnusedOutput", "Frozen", "Branch", "RandomDepth"}
"""Layers with parameters that can have no gradient, which DDP does not support by default."""


class Block(nn.Module):
    """A residual block; `scale` is a Python number that programs change during training."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 0.5

    def forward(self, x):
        return x + self.scale * self.inner(x)


@dataclass
class Output:
    scores: torch.Tensor
    features: Any


class Net(nn.Module):
    """A stem, blocks and a head; `extra` has parameters that an optimizer can get later.

    Args:
        output: the form of the output: `tensor`, `tuple`, `dict`, `object`, or `loss` for a model that returns its
            loss.
        change_input: whether forward changes its input in place.
    """

    def __init__(self, layers, image=False, output="tensor", change_input=False):
        super().__init__()
        self.image, self.output, self.change_input = image, output, change_input
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1) if image else nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(LAYERS[name](image)) for name in layers)
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.extra = nn.Linear(OUTPUTS, OUTPUTS)
        self.side = nn.Linear(WIDTH, 2) if output in ("tuple", "dict", "object") else None

    def forward(self, x, y=None):
        if self.change_input:
            x.mul_(0.5)
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = x.mean((2, 3)) if self.image else x
        scores = self.head(x)
        scores = scores + 0.1 * self.extra(scores)
        side = None if self.side is None else self.side(x)
        if self.output == "loss" and y is not None:
            return {
                "loss": F.mse_loss(scores, y),
                "error": (scores - y).abs().mean(),
                "scores": scores.detach(),
            }
        forms = {
            "tuple": (scores, side),
            "dict": dict(scores=scores, side=side),
            "object": Output(scores, side),
        }
        return forms.get(self.output, scores)


def scores_of(outputs):
    """Return the scores, whatever the form of the output."""
    if isinstance(outputs, tuple):
        return outputs[0]
    if isinstance(outputs, dict):
        return outputs["scores"]
    return outputs.scores if isinstance(outputs, Output) else outputs
