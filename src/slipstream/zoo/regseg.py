"""RegSeg, a real-time segmentation network with dilated group convolutions (arXiv 2111.09957)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.registry import MODELS
from slipstream.zoo.layers import ConvBNReLU, init_weights, outputs_of, resize
from slipstream.zoo.network import Network

_GROUP_WIDTH = 16

# Stages at 1/4, 1/8 and 1/16: the width and dilations of each block. The first block of a stage has stride 2.
_STAGES: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = (
    ((48, (1,)),),
    ((128, (1,)),) * 3,
    ((256, (1,)),) * 2 + ((256, (1, 2)),) + ((256, (1, 4)),) * 4 + ((256, (1, 14)),) * 6 + ((320, (1, 14)),),
)
_PROJECTIONS = (8, 128, 128)

# Names of modules in SuperGradients' checkpoints, and their shorter names in this file.
_RENAMED = (
    (re.compile(r"\.DBlock_[^.]*#(\d+)\."), r".\1."),
    (re.compile(r"\.shortcut\.shortcut\."), ".shortcut."),
    (re.compile(r"(^|\.)head\.head\."), r"\1head."),
)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all channels (arXiv 1709.01507)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.se_block = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, hidden, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(hidden, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with scaled channels."""
        return x * self.se_block(x)


class SplitConv(nn.Module):
    """Splits the channels evenly among the dilations, and applies a 3x3 group convolution to each part."""

    def __init__(self, channels: int, dilations: tuple[int, ...], stride: int) -> None:
        super().__init__()
        part = channels // len(dilations)
        self.convs = nn.ModuleList(_group_conv(part, dilation, stride) for dilation in dilations)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, channels, ceil(H / stride), ceil(W / stride))."""
        parts = x.chunk(len(self.convs), dim=1)
        return torch.cat([conv(part) for conv, part in zip(self.convs, parts, strict=True)], dim=1)


class DBlock(nn.Module):
    """A residual bottleneck: 1x1, dilated 3x3 group and 1x1 convolutions. Squeeze-and-excitation precedes the last."""

    def __init__(self, in_channels: int, out_channels: int, dilations: tuple[int, ...], stride: int) -> None:
        super().__init__()
        if len(dilations) == 1:
            dilated: nn.Module = _group_conv(out_channels, dilations[0], stride)
        else:
            dilated = SplitConv(out_channels, dilations, stride)
        self.d_block_path = nn.Sequential(
            ConvBNReLU(in_channels, out_channels, kernel_size=1),
            dilated,
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            SqueezeExcitation(out_channels, in_channels // 4),
            ConvBNReLU(out_channels, out_channels, kernel_size=1, relu=False),
        )
        self.shortcut = _shortcut(in_channels, out_channels, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        return self.relu(self.shortcut(x) + self.d_block_path(x))


def _group_conv(channels: int, dilation: int, stride: int) -> nn.Conv2d:
    groups = channels // _GROUP_WIDTH
    return nn.Conv2d(channels, channels, 3, stride, dilation, dilation, groups, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    pool = nn.Identity() if stride == 1 else nn.AvgPool2d(stride, stride, ceil_mode=True)
    return nn.Sequential(pool, ConvBNReLU(in_channels, out_channels, kernel_size=1, relu=False))


class Backbone(nn.Module):
    """Three stages of `DBlock` modules at 1/4, 1/8 and 1/16 of the image resolution. The input is at 1/2.

    `out_channels` contains the widths of the stages.
    """

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for stage in _STAGES:
            blocks = []
            for index, (width, dilations) in enumerate(stage):
                blocks.append(DBlock(in_channels, width, dilations, stride=1 if index else 2))
                in_channels = width
            self.stages.append(nn.Sequential(*blocks))
        self.out_channels = tuple(stage[-1][0] for stage in _STAGES)
        self.register_load_state_dict_pre_hook(_rename)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features of each stage, with sizes rounded up."""
        return outputs_of(self.stages, x)


class Decoder(nn.Module):
    """Adds the features at 1/16 to those at 1/8, convolves the sum, and concatenates it with the features at 1/4."""

    def __init__(self, in_channels: tuple[int, ...]) -> None:
        super().__init__()
        self.projections = nn.ModuleList(
            ConvBNReLU(width, projected, kernel_size=1)
            for width, projected in zip(in_channels, _PROJECTIONS, strict=True)
        )
        middle = _PROJECTIONS[1]
        self.conv_bn_relu = ConvBNReLU(middle, middle // 2)
        self.out_channels = middle // 2 + _PROJECTIONS[0]

    def forward(self, features: list[Tensor]) -> Tensor:
        """Return (N, out_channels, h, w) at the resolution of the first of the three feature maps."""
        shallow, middle, deep = (project(x) for project, x in zip(self.projections, features, strict=True))
        middle = self.conv_bn_relu(middle + resize(deep, middle, align_corners=True))
        return torch.cat([resize(middle, shallow, align_corners=True), shallow], dim=1)


class RegSeg(Network):
    """RegSeg with the exp48 backbone and the decoder26 decoder from the paper.

    Parameter names in checkpoints of SuperGradients' `regseg48` are converted when the checkpoints are loaded.

    Args:
        num_classes: number of output channels.
        dropout: dropout probability before the classifier; used only during training.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _classifiers = r"head\.1"
    _finetuned = _replaced_heads = ("head",)

    def __init__(self, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__(num_classes)
        self.stem = ConvBNReLU(3, 32, stride=2)
        # The bias of this convolution exists only to match checkpoints; BatchNorm cancels it.
        self.stem.seq.conv = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.backbone = Backbone(32)
        self.decoder = Decoder(self.backbone.out_channels)
        self.head = nn.Sequential(ConvBNReLU(self.decoder.out_channels, 64), nn.Conv2d(64, num_classes, 1))
        self.dropout = nn.Dropout(dropout)
        init_weights(self)
        self.register_load_state_dict_pre_hook(_rename)

    def heads(self, x: Tensor) -> Tensor:
        """Return logits (N, num_classes, h, w) at 1/4 of the resolution of images (N, 3, H, W) of any size."""
        conv, classifier = self.head
        features = conv(self.decoder(self.backbone(self.stem(x))))
        logits: Tensor = classifier(self.dropout(features))
        return logits


def _rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
        if prefix + name != key:
            state_dict[prefix + name] = state_dict.pop(key)


@MODELS.register_module()
def regseg48(num_classes: int = 19, dropout: float = 0.0) -> RegSeg:
    """Return RegSeg (3.3 million parameters); see `RegSeg`."""
    return RegSeg(num_classes, dropout)
