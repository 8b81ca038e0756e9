from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slipstream.zoo.segformer import EncoderBlock, SegFormer

HEADS, REDUCTIONS, STRIDES = (1, 2, 5, 8), (8, 4, 2, 1), (4, 2, 2, 2)


def tiny(depths=(2, 1, 3, 1), **options):
    return SegFormer(5, (16, 32, 80, 128), depths, 24, **options)


class Reference:
    """Reference implementation of the paper's network in evaluation mode.

    The weights come from a state dict with SuperGradients' keys. The implementation uses sequences of shape
    (N, tokens, C), explicit attention, and the decoder in the paper's order: project, resize, concatenate, fuse.
    """

    def __init__(self, state, depths):
        self.state, self.depths = state, depths

    def get(self, key):
        return self.state[f"{key}.weight"], self.state[f"{key}.bias"]

    def linear(self, key, x):
        weight, bias = self.get(key)
        return x @ weight.T + bias

    def norm(self, key, x):
        weight, bias = self.get(key)
        mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def attention(self, key, x, h, w, heads, reduction):
        n, _, width = x.shape
        reduced = x
        if reduction > 1:
            image = x.transpose(1, 2).reshape(n, width, h, w)
            image = F.conv2d(image, *self.get(f"{key}.sr"), stride=reduction)
            reduced = self.norm(f"{key}.norm", image.flatten(2).transpose(1, 2))
        q, kv = self.linear(f"{key}.q", x), self.linear(f"{key}.kv", reduced)
        outs = []
        d = width // heads
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)
            k, v = kv[..., :width][..., part], kv[..., width:][..., part]
            outs.append((q[..., part] @ k.transpose(1, 2) / d**0.5).softmax(-1) @ v)
        return self.linear(f"{key}.proj", torch.cat(outs, -1))

    def mlp(self, key, x, h, w):
        x = self.linear(f"{key}.fc1", x)
        image = x.transpose(1, 2).reshape(x.shape[0], -1, h, w)
        image = F.conv2d(image, *self.get(f"{key}.dwconv"), padding=1, groups=image.shape[1])
        return self.linear(f"{key}.fc2", F.gelu(image.flatten(2).transpose(1, 2)))

    def stage(self, number, image):
        heads, reduction, stride = HEADS[number - 1], REDUCTIONS[number - 1], STRIDES[number - 1]
        kernel = 7 if number == 1 else 3
        image = F.conv2d(image, *self.get(f"_backbone.patch_embed{number}.proj"), stride, kernel // 2)
        h, w = image.shape[2:]
        x = self.norm(f"_backbone.patch_embed{number}.norm", image.flatten(2).transpose(1, 2))
        for index in range(self.depths[number - 1]):
            key = f"_backbone.block{number}.{index}"
            x = x + self.attention(f"{key}.attn", self.norm(f"{key}.norm1", x), h, w, heads, reduction)
            x = x + self.mlp(f"{key}.mlp", self.norm(f"{key}.norm2", x), h, w)
        x = self.norm(f"_backbone.norm{number}", x)
        return x.transpose(1, 2).reshape(x.shape[0], -1, h, w)

    def __call__(self, image):
        features, x = [], image
        for number in (1, 2, 3, 4):
            x = self.stage(number, x)
            y = self.linear(f"decode_head.linear_c{number}.proj", x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            features.append(y)
        size = features[0].shape[2:]
        features = [F.interpolate(f, size, mode="bilinear", align_corners=False) for f in features]
        fuse = "decode_head.linear_fuse.seq"
        x = F.conv2d(torch.cat(features[::-1], 1), self.state[f"{fuse}.conv.weight"])
        norm = [self.state[f"{fuse}.bn.{n}"] for n in ("running_mean", "running_var", "weight", "bias")]
        x = F.conv2d(F.relu(F.batch_norm(x, *norm)), *self.get("decode_head.linear_pred"))
        return F.interpolate(x, image.shape[2:], mode="bilinear", align_corners=False)


@pytest.mark.parametrize("size", [(64, 96), (45, 67)])
def test_forward_matches_the_reference_with_supergradients_weights(size):
    torch.manual_seed(0)
    network = tiny().double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    norm = network.decode_head.linear_fuse.seq.bn
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        expected = Reference(network.state_dict(), (2, 1, 3, 1))(x)
        assert expected.std() > 0.1
        torch.testing.assert_close(network(x), expected, rtol=1e-8, atol=1e-8)


def test_every_parameter_has_a_gradient_in_training():
    torch.manual_seed(0)
    network = tiny()
    network(torch.randn(4, 3, 64, 64)).square().sum().backward()
    assert [n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_drop_path_drops_whole_branches_and_preserves_the_mean():
    torch.manual_seed(0)
    block = EncoderBlock(16, 1, 1, drop_path=0.25)
    x = torch.randn(1, 4, 4, 16)
    block.eval()
    attended = x + block.attn(block.norm1(x))
    block.train()
    block.mlp.fc2.weight.data.zero_()
    block.mlp.fc2.bias.data.zero_()
    outs = block(x.expand(400, -1, -1, -1))
    kept = torch.stack([(out - x[0]).abs().sum() > 0 for out in outs])
    assert 0.68 < kept.float().mean() < 0.82
    torch.testing.assert_close(outs[~kept], x.expand(int((~kept).sum()), -1, -1, -1))
    whole = (x + (attended - x) / 0.75).expand(int(kept.sum()), -1, -1, -1)
    torch.testing.assert_close(outs[kept], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_network_compiles_as_a_single_graph_with_the_same_gradients():
    torch.manual_seed(0)
    network = tiny(drop_path=0.5).double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def gradients(function):
        torch.manual_seed(1)
        network.zero_grad()
        out = function(x)
        out.square().mean().backward()
        return out.detach(), [p.grad.clone() for p in network.parameters()]

    compiled = torch.compile(network, fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(gradients(compiled), gradients(network), rtol=1e-9, atol=1e-9)
