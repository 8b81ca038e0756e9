"""Kernels that would compute wrong values, or corrupt memory, in the channels_last layout run in the default layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream import accelerate
from slipstream.errors import ConfigError

SRC = Path(__file__).parents[2] / "src"

SCRIPT = '''
import copy
import sys
import torch
from torch import nn
from torch.nn import functional as F
from slipstream import accelerate


class Function(nn.Module):
    """A convolution that a user-defined class computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8, 1, 1))

    def forward(self, x):
        return F.conv2d(x, self.weight, stride=(1, 2))


LAYERS = {
    "conv": lambda: nn.Conv2d(8, 12, 1, stride=2),
    "transposed": lambda: nn.ConvTranspose2d(8, 12, 1, stride=(2, 3), output_padding=(1, 0)),
    "function": Function,
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
}


def loss_fn(outputs, target):
    return (outputs.mean() - target).square() + outputs.square().mean()


def sgd(net):
    return torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=0.05)


def check(kind, speed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), LAYERS[kind](), nn.Tanh(), nn.LazyConv2d(4, 3))
    if kind == "GroupNorm":  # its input requires no gradient, and the mean of its input is large
        model[0].requires_grad_(False)
        model[0].bias.data += 1000
    batches = [(torch.randn(3, 3, 24, 32), torch.randn(())) for _ in range(20)]
    model(batches[0][0])
    expected = copy.deepcopy(model).double()
    step = accelerate(model, sgd(model), loss_fn, speed=speed)
    optimizer = sgd(expected)
    for images, target in batches:
        step((images, target))
        optimizer.zero_grad()
        loss_fn(expected(images.double()), target).backward()
        optimizer.step()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, other.float(), rtol=1e-3, atol=1e-4)


torch.set_num_threads(2)
for kind in sys.argv[2:]:
    print(kind, file=sys.stderr, flush=True)
    check(kind, eval(sys.argv[1]))
'''


@pytest.mark.slow
def test_compiled_training_with_affected_layers_matches_float64():
    # With MALLOC_CHECK_, glibc ends the process if memory is corrupted.
    env = {**os.environ, "PYTHONPATH": str(SRC), "MALLOC_CHECK_": "3"}
    speed, kinds = "dict(compile=dict(verify=False))", ["conv", "transposed", "function", "GroupNorm"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, speed, *kinds], env=env, check=True, timeout=900
    )


class Function(nn.Module):
    stride = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8, 1, 1))

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, stride=self.stride)


@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(2, 8), nn.Conv2d(8, 12, 1, 2), nn.ConvTranspose2d(8, 12, 1, 2), Function()]
)
def test_affected_layers_are_refused(layer):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer)
    with pytest.raises(ConfigError, match="channels_last: torch's CPU kernels for '1'"):
        accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), speed=dict(channels_last=True))
