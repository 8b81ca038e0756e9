"""Test that U-Net has the same parameters as SuperGradients' `unet` and that its outputs are correct."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.zoo import models

# SHA-256 of the names and shapes in the state dict of SuperGradients' `unet` with one class, in order.
NAMES = "a0d9b066afbe32011fc4ca90542e2ddeb67c3cbc93caddaf9422376ab2610010"


def test_names_shapes_and_their_order_match_the_original():
    with torch.device("meta"):
        state = models.get("unet", 1).state_dict()
    lines = "\n".join(f"{name} {tuple(value.shape)}" for name, value in state.items())
    assert hashlib.sha256(lines.encode()).hexdigest() == NAMES


def test_parameter_count_matches_the_original():
    with torch.device("meta"):
        assert sum(p.numel() for p in models.get("unet", 1).parameters()) == 13_326_688


def test_outputs_match_an_independent_computation():
    torch.manual_seed(0)
    network = models.get("unet", 2).double().eval()
    state = network.state_dict()
    for name, value in state.items():
        if "running_mean" in name or name.endswith("bn.bias"):
            value.normal_()
        elif "running_var" in name or name.endswith("bn.weight"):
            value.uniform_(0.5, 2)
    x = torch.randn(1, 3, 32, 48, dtype=torch.float64)

    def convolved(x, name):
        x = F.conv2d(x, state[f"{name}.seq.conv.weight"], padding=1)
        norm = [state[f"{name}.seq.bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *norm).relu()

    features = []
    for stage in range(5):
        first = 1 if stage else 0
        inner = F.max_pool2d(features[-1], 2) if stage else x
        for block in (first, first + 1):
            inner = convolved(inner, f"encoder.backbone.stages.{stage}.blocks.{block}")
        features.append(inner)
    out = features.pop()
    for stage in range(4):
        out = torch.cat([F.interpolate(out, scale_factor=2, mode="bilinear"), features.pop()], 1)
        out = convolved(out, f"decoder.up_stages.{stage}.last_convs.0")
        if stage < 3:
            out = convolved(out, f"decoder.up_stages.{stage}.last_convs.1.0")
    out = F.conv2d(convolved(out, "seg_head.0.seg_head.0"), state["seg_head.0.seg_head.2.weight"])
    torch.testing.assert_close(network(x), out, rtol=1e-9, atol=1e-9)


def test_images_of_at_least_16_x_16_pixels_are_accepted():
    network = models.get("unet", 3).eval()
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 33, 50)).shape == (1, 3, 33, 50)
        with pytest.raises(ModelError, match="at least 16 x 16 pixels, not 15 x 50"):
            network(torch.zeros(1, 3, 15, 50))
