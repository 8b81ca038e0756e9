from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from batch_norms import randomize_norms
from slipstream.zoo import MultiHeadCrossEntropy, pp_lite_b_seg, pp_lite_t_seg

BUILDERS = {"pp_lite_t_seg": pp_lite_t_seg, "pp_lite_b_seg": pp_lite_b_seg}
BLOCKS = {"pp_lite_t_seg": (2, 2, 2), "pp_lite_b_seg": (4, 5, 3)}


class Reference:
    """Reference implementation of the paper's network in evaluation mode.

    The weights come from a state dict with SuperGradients' keys. Image sides must be multiples of 32, because
    upsampling uses integer factors.
    """

    def __init__(self, name, state):
        self.name, self.state = name, state

    def conv(self, key, x, stride=1, relu=True):
        weight = self.state[f"{key}.seq.conv.weight"]
        groups = x.shape[1] // weight.shape[1]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        norm = [self.state[f"{key}.seq.bn.{n}"] for n in ("running_mean", "running_var", "weight", "bias")]
        x = F.batch_norm(x, *norm)
        return F.relu(x) if relu else x

    def up(self, x, factor):
        return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)

    def block(self, key, x, stride):
        parts = [self.conv(f"{key}.conv_list.0", x)]
        x = parts[0]
        if stride == 2:
            parts = [F.avg_pool2d(x, 3, 2, 1)]
            x = self.conv(f"{key}.conv_list.1.0", x, stride=2, relu=False)
            parts.append(self.conv(f"{key}.conv_list.1.1", x))
        else:
            parts.append(self.conv(f"{key}.conv_list.1", x))
        for i in (2, 3):
            parts.append(self.conv(f"{key}.conv_list.{i}", parts[-1]))
        return torch.cat(parts, 1)

    def backbone(self, x):
        x = self.conv("encoder.backbone.stages.block_s2.0", x, 2)
        x = self.conv("encoder.backbone.stages.block_s4.0", x, 2)
        features = []
        for scale, count in zip((8, 16, 32), BLOCKS[self.name], strict=True):
            for index in range(count):
                x = self.block(f"encoder.backbone.stages.block_s{scale}.{index}", x, 1 if index else 2)
            features.append(x)
        return features

    def context(self, x):
        total = torch.zeros(())
        for index, size in enumerate((1, 2, 4)):
            pooled = self.conv(f"encoder.context_module.branches.{index}.1", F.adaptive_avg_pool2d(x, size))
            total = total + F.interpolate(pooled, x.shape[2:], mode="bilinear", align_corners=False)
        return self.conv("encoder.context_module.conv_out", total)

    def fuse(self, key, x, skip):
        attention = [f(t, 1, True) for t in (x, skip) for f in (torch.mean, lambda *a: torch.max(*a)[0])]
        attention = self.conv(f"{key}.conv_atten.0", torch.cat(attention, 1))
        attention = self.conv(f"{key}.conv_atten.1", attention, relu=False).sigmoid()
        return self.conv(f"{key}.conv_out", x * attention + skip * (1 - attention))

    def head(self, key, x, factor):
        x = self.conv(f"{key}.0.seg_head.0", x)
        return self.up(F.conv2d(x, self.state[f"{key}.0.seg_head.2.weight"]), factor)

    def __call__(self, x):
        features = self.backbone(x)
        skips = [self.conv(f"encoder.proj_convs.{i}", f) for i, f in enumerate(features)]
        x = self.context(features[-1])
        for index, skip in enumerate(reversed(skips)):
            x = self.fuse(f"decoder.up_stages.{index}", self.up(x, 2) if index else x, skip)
        aux = [self.head(f"aux_heads.{i}", s, 8 * 2**i) for i, s in enumerate(skips)]
        return [self.head("seg_head", x, 8), *aux]


@pytest.mark.parametrize("name", BUILDERS)
def test_forward_equals_reference_with_supergradients_weights(name):
    torch.manual_seed(0)
    network = BUILDERS[name](num_classes=5).double().eval()
    randomize_norms(network)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        expected = Reference(name, network.state_dict())(x)
        torch.testing.assert_close(network(x), expected[0], rtol=1e-9, atol=1e-9)
        network.train()
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        torch.testing.assert_close(network(x), tuple(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_network_and_loss_compile_as_a_single_graph_with_the_same_gradients():
    torch.manual_seed(0)
    network, loss = pp_lite_t_seg(num_classes=4).double(), MultiHeadCrossEntropy()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    targets = torch.randint(0, 4, (2, 64, 64), dtype=torch.uint8)

    def step(x, targets):
        return sum(loss(network(x), targets).values())

    def gradients(function):
        network.zero_grad()
        value = function(x, targets)
        value.backward()
        return value.detach(), [p.grad.clone() for p in network.parameters()]

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(step), rtol=1e-9, atol=1e-12)
