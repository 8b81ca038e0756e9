"""Test the corrections of modules that would compute wrong values, or corrupt memory, in the channels_last layout."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.speed.cpu_fixes import correct_group_norms, correct_strided_convolutions

SRC = Path(__file__).parents[2] / "src"

SCRIPT = """
import copy
import sys
import torch
from torch import nn
from torch.nn import functional as F
from slipstream import accelerate

torch.set_num_threads(2)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 1, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
)
expected = copy.deepcopy(model).double()
batches = [(torch.randn(3, 3, 24, 32), torch.randint(0, 4, (3,))) for _ in range(20)]
optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
for images, labels in batches:
    optimizer.zero_grad()
    F.cross_entropy(expected(images.double()), labels).backward()
    optimizer.step()
step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.05), F.cross_entropy, speed=eval(sys.argv[1]))
for batch in batches:
    step(batch)
for param, other in zip(model.parameters(), expected.parameters(), strict=True):
    torch.testing.assert_close(param, other.float(), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("speed", ["dict(channels_last=True)", "dict(compile=dict(wait=True, verify=False))"])
def test_strided_convolution_with_few_channels_trains_as_in_float64(speed):
    # With MALLOC_CHECK_, glibc ends the process if memory is corrupted.
    env = {**os.environ, "PYTHONPATH": str(SRC), "MALLOC_CHECK_": "3"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, speed], env=env, check=True, timeout=300)


@pytest.mark.parametrize("stride", [2, (1, 3), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_corrected_convolution_computes_the_same_values(stride, bias):
    torch.manual_seed(0)
    plain = nn.Conv2d(5, 7, 1, stride=stride, bias=bias).double()
    corrected = copy.deepcopy(plain)
    correct_strided_convolutions(corrected, pytest.fail)
    copied = copy.deepcopy(corrected)
    inputs = torch.randn(3, 5, 11, 14, dtype=torch.float64, requires_grad=True)
    for module in (corrected, copied):
        expected, actual = plain(inputs), module(inputs)
        torch.testing.assert_close(actual, expected)
        gradient = torch.randn_like(actual)
        torch.testing.assert_close(
            torch.autograd.grad(actual, [inputs, *module.parameters()], gradient),
            torch.autograd.grad(expected, [inputs, *plain.parameters()], gradient),
        )
    assert "_conv_forward" in vars(corrected)
    assert repr(corrected) == repr(plain)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(16, 8, 1, stride=2),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Conv2d(8, 8, 1, stride=2, groups=2),
        nn.Conv2d(8, 8, 1, stride=2, padding=1),
        nn.Conv1d(8, 8, 1, stride=2),
        nn.ConvTranspose2d(8, 16, 1, stride=2),
    ],
    ids=str,
)
def test_other_convolutions_are_not_changed(module):
    before = dict(vars(module))
    correct_strided_convolutions(module, pytest.fail)
    assert vars(module) == before


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride)


@pytest.mark.parametrize(
    "module", [OwnForward(8, 8, 1, stride=2), nn.ConvTranspose2d(16, 8, 1, stride=2)], ids=str
)
def test_convolutions_that_cannot_be_corrected_are_reported(module):
    messages = []
    correct_strided_convolutions(nn.Sequential(nn.ReLU(), module), messages.append)
    (message,) = messages
    assert message.startswith("The weight gradient of '1' ")


def test_lazy_convolution_is_corrected_before_its_channels_are_known():
    module = nn.LazyConv2d(4, 1, stride=2)
    correct_strided_convolutions(module, pytest.fail)
    inputs = torch.randn(2, 3, 5, 5)
    actual = module(inputs)
    torch.testing.assert_close(actual, nn.functional.conv2d(inputs, module.weight, module.bias, 2))


GROUP_NORM = """
import torch
from torch import nn
from torch.nn import functional as F
from slipstream import accelerate

torch.manual_seed(0)
model = nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.01), F.cross_entropy, dict(channels_last=True))
for _ in range(20):
    step((torch.randn(8, 3, 16, 16), torch.randint(0, 8, (8,))))
"""


def test_group_norm_whose_input_requires_no_gradient_can_be_trained():
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", GROUP_NORM], env=env, check=True, timeout=300)


def test_group_norm_keeps_its_precision_in_the_channels_last_layout():
    torch.manual_seed(0)
    module = nn.GroupNorm(2, 8)
    correct_group_norms(module)
    correct_group_norms(module)
    assert len(module._forward_pre_hooks) == 1
    images = (torch.randn(4, 8, 16, 16) + 1000).contiguous(memory_format=torch.channels_last)
    expected = nn.GroupNorm(2, 8).double()(images.double())
    torch.testing.assert_close(module(images).double(), expected, rtol=0, atol=1e-3)
