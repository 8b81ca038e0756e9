"""Test that operators without a deterministic CUDA kernel are replaced if deterministic algorithms are enabled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.zoo import MultiHeadCrossEntropy
from slipstream.zoo.layers import AdaptiveAvgPool2d
from slipstream.zoo.losses import CrossEntropy


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)


class Operators(TorchDispatchMode):
    """Records the names of the operators."""

    def __init__(self):
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.add(operator.name())
        return operator(*args, **(kwargs or {}))


sizes = st.tuples(st.integers(1, 14), st.integers(1, 14))


@settings(max_examples=50, deadline=None)
@given(sizes, st.one_of(st.integers(1, 5), sizes), st.integers(0, 2**31))
def test_pooling_and_its_gradient_match_torch(size, bins, seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    with Operators() as operators:
        ours = AdaptiveAvgPool2d(bins)(x)
    theirs = F.adaptive_avg_pool2d(x, bins)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(ours)
    (our_gradient,) = torch.autograd.grad(ours, x, cotangent)
    (their_gradient,) = torch.autograd.grad(theirs, x, cotangent)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-12)
    assert not any("pool" in name for name in operators.seen)


@pytest.mark.parametrize(
    "loss", [MultiHeadCrossEntropy(), CrossEntropy(ignore_index=255, label_smoothing=0.1)]
)
def test_pixel_losses_do_not_depend_on_deterministic_algorithms(loss):
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 6, 7, requires_grad=True), torch.randint(0, 5, (2, 6, 7))
    targets[0, :3] = 255

    def value_and_gradient():
        found = loss(logits, targets)
        total = sum(found.values()) if isinstance(found, dict) else found
        return total.detach(), torch.autograd.grad(total, logits)[0]

    with Operators() as operators:
        value, gradient = value_and_gradient()
    assert not any("nll_loss" in name for name in operators.seen)  # its sum is nondeterministic on CUDA
    torch.use_deterministic_algorithms(False)
    expected, expected_gradient = value_and_gradient()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
