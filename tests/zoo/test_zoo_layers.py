from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from slipstream.zoo.layers import resize

sizes = st.tuples(st.integers(1, 20), st.integers(1, 20))


@settings(max_examples=50, deadline=None)
@given(sizes, sizes, st.booleans(), st.integers(0, 2**31))
def test_resize_and_its_gradient_match_bilinear_interpolation(source, target, align_corners, seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 3, *source, dtype=torch.float64, requires_grad=True)
    like = torch.randn(2, 1, *target, dtype=torch.float64)
    ours = resize(x, like, align_corners)
    theirs = F.interpolate(x, target, mode="bilinear", align_corners=align_corners)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(ours)
    (our_gradient,) = torch.autograd.grad(ours, x, cotangent)
    (their_gradient,) = torch.autograd.grad(theirs, x, cotangent)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-9, atol=1e-9)


def test_resize_in_half_precision_only_adds_rounding_error():
    x = torch.randn(2, 3, 4, 8).bfloat16()
    out = resize(x, torch.empty(2, 1, 32, 64))
    assert out.dtype == torch.bfloat16
    expected = F.interpolate(x.float(), (32, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
