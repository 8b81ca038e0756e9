from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from batch_norms import randomize_norms
from slipstream.zoo.ddrnet import ddrnet_23, ddrnet_23_slim, ddrnet_39

BUILDERS = {"ddrnet_23": ddrnet_23, "ddrnet_23_slim": ddrnet_23_slim, "ddrnet_39": ddrnet_39}
DEPTHS = {  # blocks in layer1 to layer4 and in the high-resolution branch, and repeats of layer3
    "ddrnet_23": ((2, 2, 2, 2, 2), 1),
    "ddrnet_23_slim": ((2, 2, 2, 2, 2), 1),
    "ddrnet_39": ((3, 4, 3, 3, 3), 2),
}


class Reference:
    """Reference implementation of the paper's network in evaluation mode.

    The weights come from a state dict with SuperGradients' keys. Image sides must be multiples of 64. Interpolation
    uses `F.interpolate`.
    """

    def __init__(self, name, state):
        (*self.depths, self.high_depth), self.repeats = DEPTHS[name]
        self.state = state

    def norm(self, key, x):
        return F.batch_norm(
            x, *(self.state[f"{key}.{n}"] for n in ("running_mean", "running_var", "weight", "bias"))
        )

    def conv(self, key, x, stride=1):
        weight = self.state[f"{key}.weight"]
        return F.conv2d(x, weight, self.state.get(f"{key}.bias"), stride, weight.shape[-1] // 2)

    def conv_bn(self, key, x, stride=1):
        return self.norm(f"{key}.1", self.conv(f"{key}.0", x, stride))

    def bn_relu_conv(self, key, x, first=0):
        return self.conv(f"{key}.{first + 2}", F.relu(self.norm(f"{key}.{first}", x)))

    def block(self, key, x, stride, convs, strided):
        out = x
        for i in range(1, convs + 1):
            out = self.norm(f"{key}.bn{i}", self.conv(f"{key}.conv{i}", out, stride if i == strided else 1))
            out = F.relu(out) if i < convs else out
        if f"{key}.shortcut.0.weight" in self.state:
            x = self.conv_bn(f"{key}.shortcut", x, stride)
        return out + x

    def stage(self, key, x, depth, stride=1):
        for index in range(depth):
            x = F.relu(x)  # the ReLU of the previous stage or block
            x = self.block(f"{key}.{index}", x, 1 if index else stride, 2, 1)
        return x

    def resize(self, x, size):
        return F.interpolate(x, size, mode="bilinear", align_corners=False)

    def context(self, x):
        size, outs = x.shape[2:], [self.bn_relu_conv("spp.branches.0.down_scale", x)]
        pools = [lambda x, k=k, s=s: F.avg_pool2d(x, k, s, s) for k, s in ((5, 2), (9, 4), (17, 8))]
        for i, pool in enumerate([*pools, lambda x: x.mean((2, 3), keepdim=True)], start=1):
            up = self.resize(self.bn_relu_conv(f"spp.branches.{i}.down_scale", pool(x), first=1), size)
            outs.append(self.bn_relu_conv(f"spp.branches.{i}.process", up + outs[-1]))
        return self.bn_relu_conv("spp.compression", torch.cat(outs, 1)) + self.bn_relu_conv("spp.shortcut", x)

    def head(self, key, x, size):
        x = self.conv(f"{key}.conv1", F.relu(self.norm(f"{key}.bn1", x)))
        return self.resize(self.conv(f"{key}.conv2", F.relu(self.norm(f"{key}.bn2", x))), size)

    def __call__(self, image):
        x = image
        for i in range(2):
            x = F.relu(self.conv_bn(f"_backbone.stem.{i}", x, 2))
        x = self.stage("_backbone.layer1", x, self.depths[0])
        low = high = self.stage("_backbone.layer2", x, self.depths[1], 2)
        eighth = high.shape[2:]
        for i in range(self.repeats):
            low = self.stage(f"_backbone.layer3.{i}", low, self.depths[2], 1 if i else 2)
            high = self.stage(f"layer3_skip.{i}", high, self.high_depth)
            down = self.conv_bn(f"down3.{i}", F.relu(high), 2)
            up = self.resize(self.conv_bn(f"compression3.{i}", F.relu(low)), eighth)
            low, high = low + down, high + up
        extra = self.head("seghead_extra", high, image.shape[2:])
        low = self.stage("_backbone.layer4", low, self.depths[3], 2)
        high = self.stage("layer4_skip", high, self.high_depth)
        down = self.conv_bn("down4.1", F.relu(self.conv_bn("down4.0", F.relu(high), 2)), 2)
        up = self.resize(self.conv_bn("compression4", F.relu(low)), eighth)
        low, high = low + down, high + up
        high = self.block("layer5_skip.0", F.relu(high), 1, 3, 2)
        low = self.context(self.block("layer5.0", F.relu(low), 2, 3, 2))
        return self.head("final_layer", high + self.resize(low, eighth), image.shape[2:]), extra


@pytest.mark.parametrize("name", BUILDERS)
def test_forward_equals_reference_with_supergradients_weights(name):
    torch.manual_seed(0)
    network = BUILDERS[name](num_classes=5).double().eval()
    randomize_norms(network)
    x = torch.randn(1, 3, 64, 128, dtype=torch.float64)
    with torch.no_grad():
        expected = Reference(name, network.state_dict())(x)
        torch.testing.assert_close(network(x), expected[0], rtol=1e-9, atol=1e-9)
        network.training = True  # the submodules remain in evaluation mode
        torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def test_learning_rate_prefixes_in_recipes_match_parameters():
    with torch.device("meta"):
        names = [n for n, _ in ddrnet_39().named_parameters()]
    prefixes = [
        "_backbone",
        "compression3",
        "compression4",
        "down3",
        "down4",
        *(f"layer{i}_skip" for i in (3, 4, 5)),
    ]
    slow = {n for n in names if n.startswith(tuple(prefixes))}
    assert all(any(n.startswith(prefix) for n in slow) for prefix in prefixes)
    assert {n.split(".")[0] for n in set(names) - slow} == {"layer5", "spp", "final_layer", "seghead_extra"}
