"""Tests of the lightweight ShelfNets: parameters, outputs, gradients and building blocks."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch.nn import functional as F

from slipstream.zoo import models
from slipstream.zoo.shelfnet import AttentionRefinement, ShelfBlock

# Parameter counts of SuperGradients' networks with 21 classes, and SHA-256 hashes of the names and shapes in their
# state dicts.
NETWORKS = {
    "shelfnet18_lw": (14_604_224, "4cd4d49b38468f8d5c9b8ce652d564e98dcdabdd3225c9a4a2b3323eeb8e2f65"),
    "shelfnet34_lw": (33_749_952, "7290af7b0d9831cb53ebc7905e0336053a2b344cad8f068e11e66b9aad8d3f24"),
}


@pytest.mark.parametrize(("name", "count", "digest"), [(name, *rest) for name, rest in NETWORKS.items()])
def test_parameters_match_the_original(name, count, digest):
    with torch.device("meta"):
        network = models.get(name, arch_params={"num_classes": 21, "image_size": 512})
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    lines = "\n".join(f"{key} {tuple(value.shape)}" for key, value in network.state_dict().items())
    assert hashlib.sha256(lines.encode()).hexdigest() == digest


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_have_the_size_of_the_image(name):
    with torch.device("meta"):
        network, x = models.get(name, 5), torch.empty(2, 3, 50, 70)
        assert [tuple(output.shape) for output in network(x)] == [(2, 5, 50, 70)] * 3
        assert network.eval()(x).shape == (2, 5, 50, 70)


def test_each_trained_parameter_has_a_gradient():
    network = models.get("shelfnet18_lw", 3)
    sum(output.square().mean() for output in network(torch.randn(2, 3, 64, 64))).backward()
    without = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in network.named_parameters() if name.startswith("decoder.inconv.")}


def test_a_block_uses_its_convolution_twice():
    block = ShelfBlock(4).double().eval()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    weight, bias = block.conv1.weight, block.conv1.bias

    def normalized(x, norm):
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)

    with torch.no_grad():
        for norm in (block.bn1, block.bn2):
            norm.running_mean.normal_()
            norm.bias.normal_()
        inner = normalized(F.conv2d(x, weight, bias, padding=1), block.bn1).relu()
        expected = (normalized(F.conv2d(inner, weight, bias, padding=1), block.bn2) + x).relu()
        torch.testing.assert_close(block(x), expected)


def test_attention_scales_channels_by_a_gate_of_their_means():
    part = AttentionRefinement(3, 4).double().eval()
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        part.bn_atten.running_mean.normal_()
        features = part.conv(x)
        gate = torch.einsum("oi,ni->no", part.conv_atten.weight[..., 0, 0], features.mean((2, 3)))
        gate = 1 / (1 + torch.exp(-(gate - part.bn_atten.running_mean) / (1 + part.bn_atten.eps) ** 0.5))
        torch.testing.assert_close(part(x), features * gate[..., None, None])
