from __future__ import annotations

import pytest
import torch
from stdc_references import STDC, check_forward, check_gradients
from torch.nn import functional as F

from slipstream.model import Segmentor
from slipstream.zoo import STDCLoss, stdc1_seg, stdc2_seg
from slipstream.zoo.layers import ConvBNReLU


class Reference(STDC):
    prefix = "cp.backbone"

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


@pytest.mark.parametrize(("size", "build"), [(1, stdc1_seg), (2, stdc2_seg)])
def test_forward_matches_the_reference_with_supergradients_weights(size, build):
    torch.manual_seed(0)
    check_forward(build(num_classes=5, dropout=0), Reference, size)


@pytest.mark.slow
def test_network_and_loss_are_a_single_graph_with_the_same_gradients():
    torch.manual_seed(0)
    targets = torch.randint(0, 4, (2, 64, 64), dtype=torch.uint8)
    targets[:, :9] = 19
    check_gradients(stdc1_seg(num_classes=4, dropout=0), STDCLoss(4, ignore_index=19), targets)


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
