from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from batch_norms import randomize_norms
from slipstream.zoo import regseg48

# Dilations of the paper's backbone at 1/16 of the resolution. All blocks except the last have 256 channels.
DEEP = [[1], [1], [1, 2], *[[1, 4]] * 4, *[[1, 14]] * 7]
STAGES = [[[1]], [[1]] * 3, DEEP]
WIDTHS = [[48], [128] * 3, [256] * 13 + [320]]


def super_gradients_names(state):
    """Rename the keys as in SuperGradients' checkpoints, where a block's name includes its options."""
    names = {}
    for key in state:
        parts = key.split(".")
        if parts[0] == "backbone":
            stage, block = int(parts[2]), int(parts[3])
            before = [32, *itertools.chain(*WIDTHS)]
            index = sum(map(len, WIDTHS[:stage])) + block
            options = f"in{before[index]}_out{before[index + 1]}_d{STAGES[stage][block]}"
            parts[3] = f"DBlock_{options}_gw16_s{1 if block else 2}_se4#{block}"
            if parts[4] == "shortcut":
                parts.insert(4, "shortcut")
        if parts[0] == "head":
            parts.insert(0, "head")
        names[".".join(parts)] = state[key]
    return names


class Reference:
    """Reference implementation of the paper's network in evaluation mode, with weights from a state dict."""

    def __init__(self, state):
        self.state = state

    def norm(self, key, x):
        norm = [self.state[f"{key}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *norm)

    def conv(self, key, x, stride=1):
        weight, bias = self.state[f"{key}.seq.conv.weight"], self.state.get(f"{key}.seq.conv.bias")
        return self.norm(f"{key}.seq.bn", F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2))

    def dilated(self, key, x, dilations, stride):
        parts = []
        for index, (part, dilation) in enumerate(zip(x.chunk(len(dilations), 1), dilations, strict=True)):
            name = f"{key}.weight" if len(dilations) == 1 else f"{key}.convs.{index}.weight"
            groups = part.shape[1] // 16
            parts.append(
                F.conv2d(
                    part, self.state[name], None, stride, padding=dilation, dilation=dilation, groups=groups
                )
            )
        return torch.cat(parts, 1)

    def block(self, key, x, dilations, stride):
        path = f"{key}.d_block_path"
        y = self.conv(f"{path}.0", x).relu()
        y = self.norm(f"{path}.2", self.dilated(f"{path}.1", y, dilations, stride)).relu()
        gate = y.mean((2, 3), keepdim=True)
        for index in (1, 3):
            name = f"{path}.4.se_block.{index}"
            gate = F.conv2d(gate, self.state[f"{name}.weight"], self.state[f"{name}.bias"])
            gate = gate.relu() if index == 1 else gate.sigmoid()
        assert gate.shape[1] == y.shape[1]
        y = self.conv(f"{path}.5", y * gate)
        if f"{key}.shortcut.1.seq.conv.weight" in self.state:
            x = self.conv(f"{key}.shortcut.1", F.avg_pool2d(x, 2) if stride == 2 else x)
        return (x + y).relu()

    def __call__(self, x):
        x, features = self.conv("stem", x, 2).relu(), []
        for stage, blocks in enumerate(STAGES):
            for index, dilations in enumerate(blocks):
                x = self.block(f"backbone.stages.{stage}.{index}", x, dilations, 1 if index else 2)
            features.append(x)
        x4, x8, x16 = (self.conv(f"decoder.projections.{i}", f).relu() for i, f in enumerate(features))
        x8 = x8 + F.interpolate(x16, scale_factor=2, mode="bilinear", align_corners=True)
        x8 = self.conv("decoder.conv_bn_relu", x8).relu()
        x4 = torch.cat([F.interpolate(x8, scale_factor=2, mode="bilinear", align_corners=True), x4], 1)
        x4 = self.conv("head.0", x4).relu()
        x4 = F.conv2d(x4, self.state["head.1.weight"], self.state["head.1.bias"])
        return F.interpolate(x4, scale_factor=4, mode="bilinear", align_corners=False)


def test_forward_matches_the_reference():
    torch.manual_seed(0)
    network = regseg48(num_classes=5).double().eval()
    randomize_norms(network)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(network(x), Reference(network.state_dict())(x), rtol=1e-9, atol=1e-9)
