"""Test the corrections of kernels that would compute wrong values, or corrupt memory, in the channels_last layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
KINDS = ["conv", "transposed", "function", "GroupNorm"]


@pytest.mark.parametrize(
    ("speed", "kinds"),
    [
        ("dict(channels_last=True)", KINDS),
        pytest.param(
            "dict(compile=dict(verify=False))",
            ["conv", "transposed"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["channels_last", "compiled"],
)
def test_training_with_affected_layers_matches_float64(speed, kinds):
    # With MALLOC_CHECK_, glibc ends the process if memory is corrupted.
    env = {**os.environ, "PYTHONPATH": str(SRC), "MALLOC_CHECK_": "3"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, speed, *kinds], env=env, check=True, timeout=300
    )


NORMS = """
import torch
from torch.nn import functional as F
from slipstream.speed.cpu_fixes import correct_kernels

correct_kernels([])
torch.manual_seed(0)
for shape in [(2, 6, 20, 20), (2, 6, 5, 9, 9), (1, 4, 200, 200), (0, 4, 8, 8)]:
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for mean in (0.0, 0.9, 5.0, 1000.0):
        for dtype, error in [(torch.float32, 2e-5 if mean < 1000 else 1e-3), (torch.bfloat16, 6e-2)]:
            for groups in (1, 2, shape[1]):
                x = (torch.randn(shape) + mean).to(dtype).to(memory_format=layout).requires_grad_()
                weight = torch.randn(shape[1], dtype=dtype, requires_grad=True)
                y = F.group_norm(x, groups, weight)
                gradient = torch.randn_like(y)
                y.backward(gradient)
                assert y.is_contiguous(memory_format=layout) or not x.numel()
                x64, weight64 = (value.detach().double().requires_grad_() for value in (x, weight))
                y64 = F.group_norm(x64, groups, weight64)
                y64.backward(gradient.double())
                torch.testing.assert_close(y.double(), y64, rtol=error, atol=error)
                torch.testing.assert_close(x.grad.double(), x64.grad, rtol=error, atol=error)
                if x.numel() and mean < 1000:  # torch's formula is inaccurate for a large mean in every layout
                    limit = error * weight64.grad.abs().max().item()
                    torch.testing.assert_close(weight.grad.double(), weight64.grad, rtol=error, atol=limit)
x = (torch.randn(2, 4, 8, 8) * 1e17 + 1e19).to(memory_format=torch.channels_last)
torch.testing.assert_close(F.group_norm(x, 2).double(), F.group_norm(x.double(), 2), rtol=1e-4, atol=1e-4)
"""


def test_group_norm_in_channels_last_matches_float64():
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", NORMS], env=env, check=True, timeout=300)
