from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from batch_norms import randomize_norms
from slipstream.zoo import resnet18, resnet34, resnet50

BUILDERS = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50}
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def reference_forward(name, state, x):
    """Compute the output of the network in evaluation mode, with weights from a state dict with torchvision's keys."""

    def norm(key, x):
        statistics = (state[f"{key}.{n}"] for n in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *statistics)

    def conv(key, x, stride=1):
        weight = state[f"{key}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = F.max_pool2d(F.relu(norm("bn1", conv("conv1", x, 2))), 3, 2, 1)
    strided, last = ("conv2", 3) if name == "resnet50" else ("conv1", 2)
    for stage, depth in enumerate(DEPTHS[name], start=1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            shortcut = x
            if f"{prefix}.downsample.0.weight" in state:
                shortcut = norm(f"{prefix}.downsample.1", conv(f"{prefix}.downsample.0", x, stride))
            for i in range(1, last + 1):
                x = conv(f"{prefix}.conv{i}", x, stride if f"conv{i}" == strided else 1)
                x = norm(f"{prefix}.bn{i}", x)
                x = F.relu(x if i < last else x + shortcut)
    return x.flatten(2).mean(2) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)]
)
def test_parameter_count_matches_torchvision(name, count):
    with torch.device("meta"):
        network = BUILDERS[name]()
    assert sum(p.numel() for p in network.parameters()) == count


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_forward_matches_the_reference_with_torchvision_weights(name):
    torch.manual_seed(0)
    network = BUILDERS[name](num_classes=7).double().eval()
    randomize_norms(network)
    x = torch.randn(2, 3, 64, 48, dtype=torch.float64)
    with torch.no_grad():
        expected = reference_forward(name, network.state_dict(), x)
        torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def test_small_input_keeps_its_resolution_up_to_the_first_stage():
    network = resnet18(num_classes=10, in_channels=1, small_input=True)
    seen = {}
    network.layer1.register_forward_hook(lambda m, args, out: seen.update(shape=out.shape))
    assert network(torch.randn(2, 1, 32, 32)).shape == (2, 10)
    assert seen["shape"] == (2, 64, 32, 32)
    assert network.conv1.weight.shape == (64, 1, 3, 3)
