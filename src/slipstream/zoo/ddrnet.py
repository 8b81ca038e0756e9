"""DDRNet, a real-time segmentation network with branches at two resolutions (arXiv 2101.06085)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.registry import MODELS
from slipstream.zoo.layers import init_weights, resize
from slipstream.zoo.network import Network

_CONTEXT_CHANNELS = 128
_POOLS = ((5, 2), (9, 4), (17, 8))


def _conv_bn(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, bias: bool = False
) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=bias)
    return [conv, nn.BatchNorm2d(out_channels)]


def _bn_relu_conv(in_channels: int, out_channels: int, kernel_size: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
    return [nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True), conv]


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    same = stride == 1 and in_channels == out_channels
    return nn.Sequential(*([] if same else _conv_bn(in_channels, out_channels, 1, stride)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut. The final ReLU is omitted unless `final_relu` is True."""

    def __init__(self, in_channels: int, width: int, stride: int = 1, final_relu: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv_bn(in_channels, width, 3, stride)
        self.conv2, self.bn2 = _conv_bn(width, width, 3)
        self.shortcut = _shortcut(in_channels, width, stride)
        self.final_relu = final_relu

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (N, width, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out, inplace=True) if self.final_relu else out


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a width-doubling 1x1 convolution, with a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv_bn(in_channels, width, 1)
        self.conv2, self.bn2 = _conv_bn(width, width, 3, stride)
        self.conv3, self.bn3 = _conv_bn(width, 2 * width, 1)
        self.shortcut = _shortcut(in_channels, 2 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (N, 2 * width, ceil(H / stride), ceil(W / stride)), without a final ReLU."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        return self.bn3(self.conv3(out)) + self.shortcut(x)


def _stage(in_channels: int, width: int, depth: int, stride: int = 1) -> nn.Sequential:
    """Return `depth` basic blocks. The last one has no final ReLU."""
    first = BasicBlock(in_channels, width, stride, final_relu=depth > 1)
    rest = (BasicBlock(width, width, final_relu=index < depth - 1) for index in range(1, depth))
    return nn.Sequential(first, *rest)


class DAPPMBranch(nn.Module):
    """One scale of the pyramid: pool, project, upsample, and combine with the previous scale."""

    def __init__(self, pool: nn.Module, in_channels: int, width: int) -> None:
        super().__init__()
        self.down_scale = nn.Sequential(pool, *_bn_relu_conv(in_channels, width, kernel_size=1))
        self.process = nn.Sequential(*_bn_relu_conv(width, width, kernel_size=3))

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        """Return features (N, width, h, w), given `x` (N, in_channels, h, w) and `previous` (N, width, h, w)."""
        return self.process(resize(self.down_scale(x), x) + previous)


class DAPPM(nn.Module):
    """Deep aggregation pyramid pooling over five scales, from full resolution to the global mean."""

    def __init__(self, in_channels: int, width: int, out_channels: int) -> None:
        super().__init__()
        full = nn.Sequential(*_bn_relu_conv(in_channels, width, kernel_size=1))
        pools = [nn.AvgPool2d(kernel, stride, padding=stride) for kernel, stride in _POOLS]
        # Wrap the first branch to match the parameter names in checkpoints.
        self.branches = nn.ModuleList([nn.Sequential(OrderedDict(down_scale=full))])
        self.branches.extend(
            DAPPMBranch(pool, in_channels, width) for pool in (*pools, nn.AdaptiveAvgPool2d(1))
        )
        merged = width * len(self.branches)
        self.compression = nn.Sequential(*_bn_relu_conv(merged, out_channels, kernel_size=1))
        self.shortcut = nn.Sequential(*_bn_relu_conv(in_channels, out_channels, kernel_size=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return features (N, out_channels, h, w), given `x` (N, in_channels, h, w)."""
        full, *pooled = self.branches
        scales: list[Tensor] = [full(x)]
        for branch in pooled:
            scales.append(branch(x, scales[-1]))
        return self.compression(torch.cat(scales, dim=1)) + self.shortcut(x)


class Head(nn.Module):
    """Maps features (N, in_channels, h, w) to logits (N, num_classes, h, w)."""

    def __init__(self, in_channels: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits at the resolution of `x`."""
        x = self.conv1(F.relu(self.bn1(x), inplace=True))
        return self.conv2(F.relu(self.bn2(x), inplace=True))


class Backbone(nn.Module):
    """The low-resolution branch: a stem that reduces the resolution to 1/4, and stages at 1/4, 1/8, 1/16 and 1/32.

    The stage at 1/16 is a list of parts, because the two branches exchange features after each part.
    """

    def __init__(self, width: int, depths: tuple[int, int, int, int], repeats: int) -> None:
        super().__init__()
        first, second, third, fourth = depths
        self.stem = nn.Sequential(
            nn.Sequential(*_conv_bn(3, width, 3, stride=2, bias=True), nn.ReLU(inplace=True)),
            nn.Sequential(*_conv_bn(width, width, 3, stride=2, bias=True), nn.ReLU(inplace=True)),
        )
        self.layer1 = _stage(width, width, first)
        self.layer2 = _stage(width, 2 * width, second, stride=2)
        self.layer3 = nn.ModuleList(
            _stage(4 * width if index else 2 * width, 4 * width, third, stride=1 if index else 2)
            for index in range(repeats)
        )
        self.layer4 = _stage(4 * width, 8 * width, fourth, stride=2)


class DDRNet(Network):
    """DDRNet. Build it with `ddrnet_23`, `ddrnet_23_slim` or `ddrnet_39`.

    Parameter names match SuperGradients' checkpoints.

    Training requires at least two images per batch (across all processes with SyncBatchNorm), because BatchNorm is
    applied to globally pooled features.

    Args:
        num_classes: number of output channels.
        width: number of channels at 1/4 of the resolution. There are 2, 4 and 8 times as many channels at 1/8, 1/16 and
            1/32.
        depths: number of blocks in each low-resolution stage.
        high_width: number of channels in the high-resolution branch, at 1/8 of the resolution.
        high_depth: number of blocks in each of the first two stages of the high-resolution branch.
        head_width: number of channels in the heads.
        repeats: number of parts in the stage at 1/16. The branches exchange features after each part.
        use_aux_heads: whether to add an auxiliary head, used only in training, to the high-resolution branch.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _classifiers = r"(final_layer|seghead_extra)\.conv2"
    _finetuned = _replaced_heads = ("final_layer", "seghead_extra")

    def __init__(
        self,
        num_classes: int,
        width: int,
        depths: tuple[int, int, int, int],
        high_width: int,
        high_depth: int,
        head_width: int,
        repeats: int = 1,
        use_aux_heads: bool = True,
    ) -> None:
        super().__init__(num_classes)
        self._backbone = Backbone(width, depths, repeats)
        self.compression3 = nn.ModuleList(
            nn.Sequential(*_conv_bn(4 * width, high_width, 1)) for _ in range(repeats)
        )
        self.down3 = nn.ModuleList(
            nn.Sequential(*_conv_bn(high_width, 4 * width, 3, stride=2)) for _ in range(repeats)
        )
        self.layer3_skip = nn.ModuleList(
            _stage(high_width if index else 2 * width, high_width, high_depth) for index in range(repeats)
        )
        self.compression4 = nn.Sequential(*_conv_bn(8 * width, high_width, 1))
        self.down4 = nn.Sequential(
            nn.Sequential(*_conv_bn(high_width, 2 * high_width, 3, stride=2), nn.ReLU(inplace=True)),
            nn.Sequential(*_conv_bn(2 * high_width, 8 * width, 3, stride=2)),
        )
        self.layer4_skip = _stage(high_width, high_width, high_depth)
        self.layer5_skip = nn.Sequential(Bottleneck(high_width, high_width))
        self.layer5 = nn.Sequential(Bottleneck(8 * width, 8 * width, stride=2))
        self.spp = DAPPM(16 * width, _CONTEXT_CHANNELS, 2 * high_width)
        self.final_layer = Head(2 * high_width, head_width, num_classes)
        self.seghead_extra = Head(high_width, head_width, num_classes) if use_aux_heads else None
        init_weights(self)

    def _remove_auxiliary_heads(self) -> None:
        self.seghead_extra = None

    def heads(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (N, num_classes, h, w) at 1/8 of the resolution of images (N, 3, H, W) of any size.

        In training mode with the auxiliary head, return the tuple (main, auxiliary).
        """
        backbone = self._backbone
        low = high = backbone.layer2(F.relu(backbone.layer1(backbone.stem(x))))
        stages = zip(backbone.layer3, self.layer3_skip, self.down3, self.compression3, strict=True)
        for low_stage, high_stage, down, compression in stages:
            low, high = _exchange(low_stage(F.relu(low)), high_stage(F.relu(high)), down, compression)
        high_features = high
        low, high = _exchange(
            backbone.layer4(F.relu(low)), self.layer4_skip(F.relu(high)), self.down4, self.compression4
        )
        context = resize(self.spp(self.layer5(F.relu(low))), high)
        main = self.final_layer(context + self.layer5_skip(F.relu(high)))
        if not self.training or self.seghead_extra is None:
            return main
        return main, self.seghead_extra(high_features)


def _exchange(low: Tensor, high: Tensor, down: nn.Module, compression: nn.Module) -> tuple[Tensor, Tensor]:
    """Add the features of each resolution to those of the other, and return both."""
    return low + down(F.relu(high)), high + resize(compression(F.relu(low)), high)


@MODELS.register_module()
def ddrnet_23(num_classes: int = 19, use_aux_heads: bool = True) -> DDRNet:
    """Return DDRNet-23 (20.1 million parameters at inference); see `DDRNet`."""
    return DDRNet(num_classes, 64, (2, 2, 2, 2), 128, 2, 128, use_aux_heads=use_aux_heads)


@MODELS.register_module()
def ddrnet_23_slim(num_classes: int = 19, use_aux_heads: bool = True) -> DDRNet:
    """Return DDRNet-23-slim (5.7 million parameters at inference); see `DDRNet`."""
    return DDRNet(num_classes, 32, (2, 2, 2, 2), 64, 2, 64, use_aux_heads=use_aux_heads)


@MODELS.register_module()
def ddrnet_39(num_classes: int = 19, use_aux_heads: bool = True) -> DDRNet:
    """Return DDRNet-39 (32.4 million parameters at inference); see `DDRNet`."""
    return DDRNet(num_classes, 64, (3, 4, 3, 3), 128, 3, 256, repeats=2, use_aux_heads=use_aux_heads)
