from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from batch_norms import randomize_norms
from slipstream.model import Segmentor
from slipstream.zoo import STDCLoss, stdc1_seg, stdc2_seg
from slipstream.zoo.layers import ConvBNReLU

BUILDERS = {"stdc1_seg": stdc1_seg, "stdc2_seg": stdc2_seg}
BLOCKS = {"stdc1_seg": (2, 2, 2), "stdc2_seg": (4, 5, 3)}


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
        if f"{key}.seq.bn.weight" in self.state:
            norm = [
                self.state[f"{key}.seq.bn.{n}"] for n in ("running_mean", "running_var", "weight", "bias")
            ]
            x = F.batch_norm(x, *norm)
        return F.relu(x) if relu else x

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
        x = self.conv("cp.backbone.stages.block_s2.0", x, 2)
        x = self.conv("cp.backbone.stages.block_s4.0", x, 2)
        features = []
        for scale, count in zip((8, 16, 32), BLOCKS[self.name], strict=True):
            for index in range(count):
                x = self.block(f"cp.backbone.stages.block_s{scale}.{index}", x, 1 if index else 2)
            features.append(x)
        return features

    def refine(self, key, x):
        x = self.conv(f"{key}.conv_first", x)
        return x * self.conv(f"{key}.attention_block.1", x.mean((2, 3), True), relu=False).sigmoid()

    def double(self, key, x):
        return self.conv(f"{key}.1", F.interpolate(x, scale_factor=2, mode="nearest"))

    def fuse(self, details, context):
        x = self.conv("ffm.pw_conv", torch.cat([details, context], 1))
        gate = self.conv("ffm.attention_block.1", x.mean((2, 3), True))
        gate = F.conv2d(gate, self.state["ffm.attention_block.2.weight"]).sigmoid()
        return x * gate + x

    def head(self, key, x, factor):
        x = self.conv(f"{key}.0.seg_head.0", x)
        x = F.conv2d(x, self.state[f"{key}.0.seg_head.2.weight"])
        return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)

    def __call__(self, x):
        f8, f16, f32 = self.backbone(x)
        overall = self.conv("cp.context_embedding.context_embedding.1", f32.mean((2, 3), True))
        x = self.double("cp.upsample32", self.refine("cp.arm32", f32) + overall)
        x = self.double("cp.upsample16", self.refine("cp.arm16", f16) + x)
        return (
            self.head("segmentation_head", self.fuse(f8, x), 8),
            self.head("aux_head_s32", f32, 32),
            self.head("aux_head_s16", f16, 16),
            self.head("detail_head8", f8, 8),
        )


@pytest.mark.parametrize("name", BUILDERS)
def test_forward_matches_the_reference_with_supergradients_weights(name):
    torch.manual_seed(0)
    network = BUILDERS[name](num_classes=5, dropout=0).double().eval()
    randomize_norms(network)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        expected = Reference(name, network.state_dict())(x)
        torch.testing.assert_close(network(x), expected[0], rtol=1e-9, atol=1e-9)
        network.train()
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_network_and_loss_are_a_single_graph_with_the_same_gradients():
    torch.manual_seed(0)
    network, loss = stdc1_seg(num_classes=4, dropout=0).double(), STDCLoss(4, ignore_index=19)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    targets = torch.randint(0, 4, (2, 64, 64), dtype=torch.uint8)
    targets[:, :9] = 19

    def step(x, targets):
        return sum(loss(network(x), targets).values())

    def gradients(function):
        value = function(x, targets)
        return value.detach(), torch.autograd.grad(value, list(network.parameters()))

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(step), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_inductor_keeps_the_gradient_of_the_doubled_context():
    """`nn.Upsample` is the network's only interpolation without `layers.resize`, which documents the problem."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Upsample(scale_factor=2), ConvBNReLU(3, 4)).double()
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)

    def gradients(function):
        return torch.autograd.grad(function(x)[..., :9, :].square().sum(), [x, *layers.parameters()])

    compiled = torch.compile(layers, fullgraph=True, dynamic=False)
    torch.testing.assert_close(gradients(compiled), gradients(layers), rtol=1e-9, atol=1e-9)


def test_segmentor_trains_with_four_outputs():
    torch.manual_seed(0)
    network = dict(type="stdc1_seg", num_classes=3, dropout=0.0)
    loss = dict(type="STDCLoss", num_classes=3, ignore_index=19)
    model = Segmentor(network, loss)
    targets = torch.zeros(2, 64, 64, dtype=torch.uint8)
    targets[:, 24:, 8:40] = 2
    data = {"inputs": torch.randn(2, 3, 64, 64) + targets[:, None], "targets": targets}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    values = []
    for _ in range(8):
        losses = model(**data, mode="loss")
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        values.append({name: value.item() for name, value in losses.items()})
    assert set(values[0]) == {"loss_main", "loss_aux0", "loss_aux1", "loss_detail"}
    assert all(values[-1][name] < 0.8 * values[0][name] for name in ("loss_main", "loss_aux0", "loss_detail"))
