"""ShelfNet for real-time segmentation, in SuperGradients' lightweight version (arXiv 1811.11254)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.registry import MODELS
from slipstream.zoo.ddrnet import BasicBlock
from slipstream.zoo.layers import ConvBlock, outputs_of
from slipstream.zoo.network import Network

_LEVELS = 3
_HIDDEN_CHANNELS = 64
_DROPOUT = 0.25


class ShelfBlock(nn.Module):
    """A residual block whose two 3x3 convolutions share their weights, with channel dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout2d(_DROPOUT)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        out = self.dropout(F.relu(self.bn1(self.conv1(x))))
        return F.relu(self.bn2(self.conv1(out)) + x, inplace=True)


class AttentionRefinement(nn.Module):
    """A convolution whose output channels are scaled by gates computed from the channel means."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = ConvBlock(in_channels, out_channels)
        self.conv_atten = nn.Conv2d(out_channels, out_channels, 1, bias=False)
        self.bn_atten = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, H, W)."""
        features: Tensor = self.conv(x)
        means = features.mean((2, 3), keepdim=True)
        gates: Tensor = self.bn_atten(self.conv_atten(means)).sigmoid()
        return features * gates


class Backbone(nn.Module):
    """The stages of a ResNet. `forward` does not return the features at 1/4 of the resolution."""

    def __init__(self, in_channels: int, depths: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, depths[0], 1)
        self.layer2 = _stage(64, 128, depths[1], 2)
        self.layer3 = _stage(128, 256, depths[2], 2)
        self.layer4 = _stage(256, 512, depths[3], 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features at 1/8, 1/16 and 1/32 of the resolution, with 128, 256 and 512 channels."""
        x = self.layer1(self.maxpool(F.relu(self.bn1(self.conv1(x)))))
        return outputs_of((self.layer2, self.layer3, self.layer4), x)


def _stage(in_channels: int, width: int, depth: int, stride: int) -> nn.Sequential:
    rest = (BasicBlock(width, width, final_relu=True) for _ in range(depth - 1))
    return nn.Sequential(BasicBlock(in_channels, width, stride, final_relu=True), *rest)


def _enlarge(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` with each pixel repeated 2 x 2 times, cropped to the size of `like`."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")[..., : like.shape[-2], : like.shape[-1]]


class AscendingBranch(nn.Module):
    """The ascending branch of the decoder and of the ladder, from the lowest to the highest resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inconv = ShelfBlock(width)
        self._add_descent(width)
        self.bottom = ShelfBlock(width * 2 ** (_LEVELS - 1))
        widths = [width * 2**level for level in reversed(range(_LEVELS))]
        self.up_conv_list = nn.ModuleList(
            AttentionRefinement(deep, shallow) for deep, shallow in itertools.pairwise(widths)
        )
        self.up_dense_list = nn.ModuleList(ConvBlock(shallow, shallow) for shallow in widths[1:])

    def _add_descent(self, width: int) -> None:
        """Add the descending branch, which only the ladder has."""

    def ascend(self, deepest: Tensor, skips: list[Tensor]) -> list[Tensor]:
        """Return the features from the lowest to the highest resolution; `skips` are in the opposite order."""
        features = [self.bottom(deepest)]
        stages = zip(self.up_conv_list, self.up_dense_list, reversed(skips), strict=True)
        for convolution, dense, skip in stages:
            features.append(dense(_enlarge(convolution(features[-1]), skip) + skip))
        return features


class Decoder(AscendingBranch):
    """Fuses the backbone's features from deep to shallow. `inconv` is unused, but is part of checkpoints."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inconv.requires_grad_(False)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Return the features from the lowest to the highest resolution; the input is in the opposite order."""
        return self.ascend(features[-1], features[:-1])


class Ladder(AscendingBranch):
    """Processes the decoder's features from the highest to the lowest resolution, and then in reverse order."""

    def _add_descent(self, width: int) -> None:
        widths = [width * 2**level for level in range(_LEVELS - 1)]
        self.down_module_list = nn.ModuleList(ShelfBlock(inner) for inner in widths)
        self.down_conv_list = nn.ModuleList(
            nn.Conv2d(inner, 2 * inner, 3, stride=2, padding=1) for inner in widths
        )

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Return the features from the lowest to the highest resolution; the input is in the same order."""
        x = self.inconv(features[-1])
        skips = []
        descents = zip(self.down_module_list, self.down_conv_list, reversed(features[1:]), strict=True)
        for block, convolution, feature in descents:
            skips.append(block(x + feature))
            x = F.relu(convolution(skips[-1]))
        return self.ascend(x, skips)


class NetOutput(nn.Module):
    """Maps features (N, in_channels, h, w) to logits (N, num_classes, h, w)."""

    def __init__(self, in_channels: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.conv = ConvBlock(in_channels, hidden)
        self.conv_out = nn.Conv2d(hidden, num_classes, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits at the resolution of `x`."""
        return self.conv_out(self.conv(x))


class ShelfNet(Network):
    """The lightweight ShelfNet. Build it with `shelfnet18_lw` or `shelfnet34_lw`.

    Parameter names match those in SuperGradients' checkpoints. Training requires at least two images per batch (with
    SyncBatchNorm, across all processes), because BatchNorm is applied to globally pooled features.

    Args:
        num_classes: number of output channels.
        depths: number of blocks in each stage of the backbone.
        width: number of channels at 1/8 of the resolution; 64 or 128.
        in_channels: number of image channels.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _align_corners = True
    _classifiers = r"net_output_list\.\d\.conv_out"
    _finetuned = ("net_output_list",)

    def __init__(
        self, num_classes: int, depths: tuple[int, int, int, int], width: int, in_channels: int = 3
    ) -> None:
        super().__init__(num_classes)
        widths = [width * 2**level for level in range(_LEVELS)]
        self.backbone = Backbone(in_channels, depths)
        # The backbone's features have 128, 256 and 512 channels. If `width` is 64, 1x1 convolutions halve them.
        halved = widths if width < 128 else []
        self.conv_out_list = nn.ModuleList(ConvBlock(2 * inner, inner, kernel_size=1) for inner in halved)
        self.net_output_list = nn.ModuleList(
            NetOutput(inner, _HIDDEN_CHANNELS if level else width, num_classes)
            for level, inner in enumerate(widths)
        )
        self.ladder = Ladder(width)
        self.decoder = Decoder(width)
        _init_weights(self)

    def _remove_auxiliary_heads(self) -> None:
        self.net_output_list = self.net_output_list[:1]

    def heads(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return logits (N, num_classes, h, w) for images (N, in_channels, H, W).

        In training mode, return the tuple (main, aux at 1/16, aux at 1/32), unless the auxiliary heads have been
        removed.
        """
        features = self.backbone(x)
        if self.conv_out_list:
            features = [halve(f) for halve, f in zip(self.conv_out_list, features, strict=True)]
        fused = self.ladder(self.decoder(features))[::-1]
        count = len(self.net_output_list) if self.training else 1
        heads = zip(range(count), self.net_output_list, fused, strict=False)
        logits = tuple(head(f) for _, head, f in heads)
        return logits if count > 1 else logits[0]


@torch.no_grad()
def _init_weights(network: ShelfNet) -> None:
    """Initialize the convolutions of `ConvBlock`, `AttentionRefinement` and `NetOutput` as SuperGradients does."""
    for module in network.modules():
        if isinstance(module, ConvBlock | AttentionRefinement | NetOutput):
            for layer in module.children():
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight, a=1)


@MODELS.register_module()
def shelfnet18_lw(num_classes: int = 21, in_channels: int = 3, image_size: int = 512) -> ShelfNet:
    """Return the lightweight ShelfNet with a ResNet-18 backbone; see `ShelfNet`. `image_size` has no effect."""
    return ShelfNet(num_classes, (2, 2, 2, 2), 64, in_channels)


@MODELS.register_module()
def shelfnet34_lw(num_classes: int = 21, in_channels: int = 3, image_size: int = 512) -> ShelfNet:
    """Return the lightweight ShelfNet with a ResNet-34 backbone; see `ShelfNet`. `image_size` has no effect."""
    return ShelfNet(num_classes, (3, 4, 6, 3), 128, in_channels)
