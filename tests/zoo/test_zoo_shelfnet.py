"""Tests of the lightweight ShelfNets: parameters, outputs, gradients and building blocks."""

from __future__ import annotations

import hashlib

import pytest
import torch

from slipstream.zoo import models

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
