"""Test that sliding-window inference matches a plain loop over windows and covers every pixel."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.model.tasks import SlidingWindow, slide


def by_hand(network, images, crop, stride):
    """Reference implementation that processes one window at a time."""
    (width, height), (step_x, step_y) = crop, stride
    high, wide = images.shape[-2:]
    images = F.pad(images, (0, max(width - wide, 0), 0, max(height - high, 0)))
    pixels_high, pixels_wide = images.shape[-2:]
    total = count = 0
    y = 0
    while True:
        top, x = min(y, pixels_high - height), 0
        while True:
            left = min(x, pixels_wide - width)
            padding = (left, pixels_wide - left - width, top, pixels_high - top - height)
            part = network(images[..., top : top + height, left : left + width])
            total, count = total + F.pad(part, padding), count + F.pad(torch.ones_like(part), padding)
            if left + width == pixels_wide:
                break
            x += step_x
        if top + height == pixels_high:
            break
        y += step_y
    assert count.min() >= 1
    return (total / count)[..., :high, :wide]


def context_network(classes=3):
    """Return a network whose output at a pixel depends on its position in the window, so wrong windows are detected."""
    torch.manual_seed(0)
    return nn.Conv2d(3, classes, 5, padding=2).double().requires_grad_(False)


sizes = st.tuples(st.integers(1, 23), st.integers(1, 23))


@settings(max_examples=40, deadline=None)
@given(size=sizes, crop=sizes, step=sizes, count=st.integers(1, 3), batch_size=st.integers(1, 5))
def test_slide_matches_a_plain_loop_over_windows(size, crop, step, count, batch_size):
    stride = tuple(min(s, c) for s, c in zip(step, crop, strict=True))
    images = torch.randn(count, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    network = context_network()
    found = slide(network, images, SlidingWindow(crop, stride, batch_size))
    torch.testing.assert_close(found, by_hand(network, images, crop, stride), rtol=1e-12, atol=1e-12)


def test_smaller_logits_are_resized_and_auxiliary_logits_are_ignored():
    images = torch.rand(1, 3, 8, 16)
    logits = slide(lambda x: (F.avg_pool2d(x, 4), None), images, SlidingWindow((16, 8), (16, 8)))
    expected = F.interpolate(F.avg_pool2d(images, 4), (8, 16), mode="bilinear")
    torch.testing.assert_close(logits, expected)


def test_slide_compiles_to_a_single_graph():
    network = context_network()
    images = torch.rand(1, 3, 9, 13, dtype=torch.float64)
    window = SlidingWindow((8, 8), (5, 5))
    compiled = torch.compile(lambda x: slide(network, x, window), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), slide(network, images, window))
