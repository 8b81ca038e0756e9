"""The networks of the generated programs: stacks of small layers, many of which have side effects."""

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
LAYERS: dict[str, type] = {}
KINDS = collections.defaultdict(set)
"""The names of the layers of each kind:

- `python`: has side effects that `activation_checkpointing` repeats, as its page says; `hooked`: has hooks, which it
  also repeats.
- `random`: draws random numbers, which depend on the dtype and on the memory layout.
- `discontinuous`: a rounding error can change the result.
- `untrained`: has parameters that can have no gradient, which DDP does not support by default.
"""
_LOG = logging.getLogger("generated")
_LOG.propagate = False


def layer(attributes=lambda image: {}, *kinds):
    """Add a layer, whose forward pass is the decorated function, to `LAYERS`.

    A layer maps a tensor to one of the same shape, with `WIDTH` channels in dimension 1. `attributes(image)` returns
    its attributes; tensors are buffers, which are not saved if their name ends with `_`.
    """

    def add(forward):
        def init(self, image):
            nn.Module.__init__(self)
            self.image = image
            for name, value in attributes(image).items():
                if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                    self.register_buffer(name, value, persistent=not name.endswith("_"))
                else:
                    setattr(self, name, value)

        LAYERS[forward.__name__] = type(
            forward.__name__, (nn.Module,), {"__init__": init, "forward": forward}
        )
        for kind in kinds:
            KINDS[kind].add(forward.__name__)
        return forward

    return add


def _like(values, x):
    """Return the values of the channels in a shape that broadcasts against `x`."""
    return values.view(-1, *[1] * (x.ndim - 2))


def _means(x):
    return x.detach().transpose(0, 1).flatten(1).mean(1)


def _mixing(image, bias=True):
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bias) if image else nn.Linear(WIDTH, WIDTH, bias=bias)


def _mix(image):
    return {"mix": _mixing(image)}


def _two(image):
    return {"one": _mixing(image), "two": _mixing(image)}


def _zeros(*names, size=()):
    return lambda image: {name: torch.zeros(size) for name in names}


def _tokens(x, image):
    return x.flatten(2).transpose(1, 2) if image else x[:, None]


# ---- parameters -------------------------------------------------------------------------------------------


@layer(_mix)
def mix(self, x):
    return torch.tanh(self.mix(x))


@layer(lambda image: dict(a=nn.Parameter(torch.rand(WIDTH)), b=nn.Parameter(torch.rand(WIDTH))))
def summed(self, x):
    """Two parameters that are added, and therefore have the same gradient."""
    return x + _like(self.a + self.b, x)


@layer(lambda image: dict(mix=nn.LazyConv2d(WIDTH, 1) if image else nn.LazyLinear(WIDTH)))
def lazy(self, x):
    return torch.tanh(self.mix(x))


@layer(_mix)
def shared(self, x):
    return torch.tanh(self.mix(torch.tanh(self.mix(x))))


def _tied(image):
    layers = _two(image)
    layers["two"].weight = layers["one"].weight
    return layers


@layer(_tied)
def tied(self, x):
    return self.two(torch.sigmoid(self.one(x)))


@layer(lambda image: dict(_two(image), scale=nn.Parameter(torch.ones(()))), "untrained")
def unused(self, x):
    return torch.tanh(self.one(x))


@layer(lambda image: dict(_two(image), drop=nn.Dropout(0.5)), "untrained", "random")
def unused_output(self, x):
    self.drop(self.two(x))
    return torch.tanh(self.one(x))


@layer(lambda image: dict(mix=_mixing(image).requires_grad_(False)), "untrained")
def frozen(self, x):
    return torch.tanh(self.mix(x))


# ---- state ------------------------------------------------------------------------------------------------


@layer(lambda image: dict(calls=torch.zeros((), dtype=torch.long)))
def counter(self, x):
    self.calls += 1
    return x * (1 + 0.1 * (self.calls % 3).to(x.dtype))


@layer(lambda image: dict(calls=0), "python")
def python_counter(self, x):
    self.calls += 1
    return x * (1 + 0.1 * (self.calls % 3))


@layer(_zeros("t"))
def decaying(self, x):
    """A time that forward changes and that backward needs."""
    y = x * torch.exp(-0.1 * self.t)
    self.t += 1
    return y


@layer(lambda image: dict(history=collections.deque(maxlen=3)), "python")
def history(self, x):
    self.history.append(x.detach().mean())
    return x - sum(self.history) / len(self.history)


@layer(lambda image: dict(history=collections.deque(maxlen=3)), "python")
def history_product(self, x):
    """Python state that forward changes and that backward needs."""
    self.history.append(x.detach().std())
    return x * (sum(self.history) / len(self.history))


@layer(lambda image: dict(means=[]), "python")
def growing(self, x):
    self.means.append(float(x.detach().mean()))
    return x * (1 + 0.01 * self.means[-1])


@layer()
def host_number(self, x):
    return x * (1 + 0.1 * min(x.detach().abs().max().item(), 1.0))


@layer()
def logs(self, x):
    _LOG.warning("shape %s", tuple(x.shape))
    return x * 1.1


@layer(_two, "untrained", "discontinuous")
def branch(self, x):
    """Control flow that depends on the data."""
    return torch.tanh(self.one(x) if x.detach().mean() > 0 else self.two(x) + self.one(x))


@layer(_mix, "untrained", "random", "python")
def random_depth(self, x):
    return x if self.training and random.random() < 0.3 else torch.tanh(self.mix(x))


@layer(lambda image: {}, "random", "python")
def numpy_noise(self, x):
    return x * (1 + 0.1 * np.random.rand()) if self.training else x


@layer(lambda image: {}, "random")
def torch_noise(self, x):
    return x + 0.1 * torch.randn_like(x) * torch.rand(()).to(x.dtype) if self.training else x


@layer(lambda image: {}, "random")
def unused_random(self, x):
    torch.rand(3)
    return torch.sin(x)


@layer(lambda image: dict(drop=nn.Dropout(0.3)), "random")
def dropout(self, x):
    return self.drop(x)


@layer(_zeros("mean", size=WIDTH))
def running_mean(self, x):
    """A moving average in forward, in place."""
    if self.training:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(_means(x), alpha=0.1)
    return x - _like(self.mean, x)


@layer(_zeros("mean", size=WIDTH))
def assigned_mean(self, x):
    """A moving average that is assigned to the buffer."""
    self.mean = 0.9 * self.mean + 0.1 * _means(x)
    return x * (1 + _like(self.mean, x))


def _views(image):
    whole = torch.zeros(2, WIDTH)
    return dict(whole=whole, row=whole[0])


@layer(_views)
def shared_memory(self, x):
    """Buffers that share memory."""
    with torch.no_grad():
        self.row.add_(_means(x), alpha=0.1)
        self.whole[1].add_(0.01)
    return x + _like(self.whole.sum(0), x)


@layer(lambda image: dict(ones=torch.ones(1).expand(WIDTH), steps_=torch.zeros(())))
def expanded(self, x):
    """A buffer that is expanded, and one that is not saved."""
    self.steps_ += 1
    return x * _like(self.ones, x) * (1 + 0.05 * torch.cos(self.steps_))


def _block(image):
    norm = nn.BatchNorm2d if image else nn.BatchNorm1d
    return dict(block=nn.Sequential(_mixing(image), norm(WIDTH), nn.Tanh(), nn.Dropout(0.2)))


@layer(_block, "random", "hooked")
def checkpointed(self, x):
    """The user's own activation checkpointing, around BatchNorm and dropout."""
    return checkpoint(self.block, x, use_reentrant=False) if torch.is_grad_enabled() else self.block(x)


@layer(_block, "random", "hooked", "untrained")
def reentrant_checkpointed(self, x):
    return checkpoint(self.block, x, use_reentrant=True) if torch.is_grad_enabled() else self.block(x)


# ---- autograd ---------------------------------------------------------------------------------------------


@layer(_mix)
def full_precision(self, x):
    """A region without autocast."""
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(self.mix(x.to(self.mix.weight.dtype)))


@layer(_mix)
def inner_gradient(self, x):
    """A forward pass that contains a gradient, as in models of energies and forces."""
    if not torch.is_grad_enabled():
        return torch.tanh(self.mix(x))
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(torch.tanh(self.mix(x)).square().sum(), x, create_graph=True)[0]


@layer()
def inference(self, x):
    with torch.inference_mode():
        mean = x.detach().mean()
    return x + 0.1 * mean


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


@layer(lambda image: {}, "discontinuous")
def straight_through(self, x):
    return _Straight.apply(x)


def _hooked(method, hook, of=lambda module: module):
    def attributes(image):
        found = _mix(image)
        getattr(of(found["mix"]), method)(hook)
        return found

    return attributes


def _halve_gradients(module, inputs, outputs):
    return tuple(grad if grad is None else grad * 0.5 for grad in inputs)


@layer(_hooked("register_hook", lambda grad: grad * 0.5, lambda module: module.weight))
def weight_hook(self, x):
    return torch.tanh(self.mix(x))


@layer(lambda image: {}, "hooked")
def tensor_hook(self, x):
    y = torch.sin(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return y


@layer(_hooked("register_forward_hook", lambda module, args, output: output * 0.9), "hooked")
def forward_hook(self, x):
    return torch.tanh(self.mix(x))


@layer(_hooked("register_full_backward_hook", _halve_gradients), "hooked")
def backward_hook(self, x):
    return torch.tanh(self.mix(x))


@layer(lambda image: dict(mix=nn.utils.parametrizations.spectral_norm(_mixing(image))))
def spectral(self, x):
    return torch.tanh(self.mix(x))


@layer(lambda image: dict(mix=nn.utils.spectral_norm(_mixing(image))))
def old_spectral(self, x):
    return torch.tanh(self.mix(x))


@layer(lambda image: dict(mix=nn.utils.parametrizations.weight_norm(_mixing(image))))
def weight_norm(self, x):
    return torch.tanh(self.mix(x))


@layer()
def in_place(self, x):
    y = x * 1.0
    y.mul_(1.2).clamp_(-2, 2)
    return F.leaky_relu(y, 0.2, inplace=True)


# ---- usual layers -----------------------------------------------------------------------------------------


def _norm(momentum):
    def attributes(image):
        norm = nn.BatchNorm2d if image else nn.BatchNorm1d
        return dict(norm=nn.Sequential(_mixing(image, False), norm(WIDTH, momentum=momentum)))

    return attributes


@layer(_norm(0.1))
def norm(self, x):
    return torch.relu(self.norm(x))


@layer(_norm(None))
def cumulative_norm(self, x):
    return torch.relu(self.norm(x))


@layer(lambda image: dict(norm=nn.GroupNorm(2, WIDTH)))
def group_norm(self, x):
    return F.silu(self.norm(x))


def _attention(image):
    size = WIDTH if image else 4
    return dict(project=nn.Linear(size, 3 * size), norm=nn.LayerNorm(size))


@layer(_attention)
def attention(self, x):
    """Attention over two tokens of four channels, or over the pixels."""
    tokens = _tokens(x, True) if self.image else x.reshape(-1, 2, 4)
    y = F.scaled_dot_product_attention(*self.project(self.norm(tokens)).chunk(3, -1))
    return (y.transpose(1, 2) if self.image else y).reshape(x.shape)


@layer(lambda image: dict(attention=nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)), "random")
def headed_attention(self, x):
    tokens = _tokens(x, self.image)
    return self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape)


@layer(lambda image: dict(cell=nn.GRU(WIDTH, WIDTH, batch_first=True)))
def recurrent(self, x):
    return self.cell(_tokens(x, self.image))[0].transpose(1, 2).reshape(x.shape)


@layer(lambda image: dict(table=nn.Embedding(9, WIDTH)), "discontinuous")
def embedded(self, x):
    rows = self.table(((x.detach().flatten(1).mean(1) + 2) * 2).nan_to_num().clamp(0, 8).long())
    return x + rows.view(*rows.shape, *[1] * (x.ndim - 2))


@layer(lambda image: dict(codes=torch.randn(4, WIDTH)), "discontinuous")
def codebook(self, x):
    """A vector-quantized layer whose codes are moving averages of the inputs."""
    flat = x.detach().transpose(1, -1).reshape(-1, WIDTH).to(self.codes.dtype)
    index = torch.cdist(flat, self.codes).argmin(1)
    if self.training:
        with torch.no_grad():
            hits = F.one_hot(index, 4).to(flat.dtype)
            self.codes.lerp_(hits.t() @ flat / hits.sum(0).clamp(min=1)[:, None], 0.1)
    codes = self.codes[index].view_as(x.transpose(1, -1)).transpose(1, -1)
    return x + (codes - x).detach()


# ---- networks ---------------------------------------------------------------------------------------------


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
