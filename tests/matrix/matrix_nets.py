"""The two networks of the matrix and their batches. Smooth layers without redundant biases limit rounding errors."""

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, CLASSES = 20, 8, 4
EPOCH = 4
"""Number of batches per epoch."""


CALLS = WeakKeyDictionary()
"""The number of eager calls of each module. A verification compares the module's own attributes."""


def count_call(module):
    CALLS[module] = CALLS.get(module, 0) + 1


class Block(nn.Module):
    """The block for activation checkpointing and sharding. `CALLS` counts its eager calls."""

    def forward(self, x):
        if not torch.compiler.is_compiling():
            count_call(self)
        return self.inside(x)


class ConvBlock(Block):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def inside(self, x):
        return x + F.silu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.block = ConvBlock()
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.silu(self.norm(self.stem(x)))
        return self.head(self.block(x).mean((2, 3)))


class Layer(Block):
    """A transformer layer with two heads."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)  # the gradient of a key bias would be rounding noise
        self.out = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def inside(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=3)
        self.place = nn.Parameter(torch.randn(4, 8) * 0.1)
        self.block = Layer()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.block(x)).mean(1))


NETS = {"conv": ConvNet, "transformer": Transformer}
OPTIMIZERS = {
    "conv": dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=0.01),
    # Adam divides gradients by their magnitude. A large eps prevents it from amplifying rounding noise.
    "transformer": dict(type="AdamW", lr=0.01, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1),
}


def make(net):
    """Return a network with fixed initial weights."""
    torch.manual_seed(0)
    return NETS[net]()


def samples():
    """Return the images and classes of an epoch."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(EPOCH * BATCH, 3, 6, 6, generator=generator)
    return images, torch.randint(0, CLASSES, (EPOCH * BATCH,), generator=generator)


def batches():
    """Return the batches of all steps."""
    images, classes = samples()
    return list(zip(images.split(BATCH), classes.split(BATCH), strict=True)) * (STEPS // EPOCH)
