from __future__ import annotations

import pytest
import torch
from stdc_references import STDC, check_forward, check_gradients
from torch.nn import functional as F

from slipstream.zoo import MultiHeadCrossEntropy, pp_lite_b_seg, pp_lite_t_seg


class Reference(STDC):
    prefix = "encoder.backbone"

    def up(self, x, factor):
        return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)

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


@pytest.mark.parametrize(("size", "build"), [(1, pp_lite_t_seg), (2, pp_lite_b_seg)])
def test_forward_matches_the_reference_with_supergradients_weights(size, build):
    torch.manual_seed(0)
    check_forward(build(num_classes=5), Reference, size)


@pytest.mark.slow
def test_network_and_loss_are_a_single_graph_with_the_same_gradients():
    torch.manual_seed(0)
    targets = torch.randint(0, 4, (2, 64, 64), dtype=torch.uint8)
    check_gradients(pp_lite_t_seg(num_classes=4), MultiHeadCrossEntropy(), targets)
