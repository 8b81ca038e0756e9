"""U-Net with bilinear upsampling and BatchNorm (arXiv 1505.04597)."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.registry import MODELS
from slipstream.zoo.layers import ConvBNReLU, SegmentationHead, check_size, init_weights, outputs_of, resize
from slipstream.zoo.network import Network

_WIDTHS = (64, 128, 256, 512, 512)
_UP_WIDTHS = (256, 128, 64, 32)


class Stage(nn.Module):
    """Two convolutions, preceded by max-pooling in all stages except the first."""

    def __init__(self, in_channels: int, width: int, pool: bool) -> None:
        super().__init__()
        pooling = [nn.MaxPool2d(2, 2)] if pool else []
        self.blocks = nn.Sequential(*pooling, ConvBNReLU(in_channels, width), ConvBNReLU(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of the stage."""
        return self.blocks(x)


class Backbone(nn.Module):
    """Stages at 1, 1/2, 1/4, 1/8 and 1/16 of the resolution."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        widths = (in_channels, *_WIDTHS)
        self.stages = nn.ModuleList(
            Stage(in_width, width, pool=index > 0)
            for index, (in_width, width) in enumerate(itertools.pairwise(widths))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features of each stage."""
        return outputs_of(self.stages, x)


class UpBlock(nn.Module):
    """Resizes deep features to the size of the skip connection, concatenates the two, and applies convolutions."""

    def __init__(self, in_channels: int, skip: int, width: int, repeats: int) -> None:
        super().__init__()
        rest = (ConvBNReLU(width, width) for _ in range(repeats - 1))
        self.last_convs = nn.Sequential(ConvBNReLU(in_channels + skip, width), nn.Sequential(*rest))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return (N, width, h, w) at the resolution of `skip`."""
        return self.last_convs(torch.cat([resize(x, skip), skip], dim=1))


class Decoder(nn.Module):
    """Fuses the features from deep to shallow."""

    def __init__(self) -> None:
        super().__init__()
        inputs, skips = (_WIDTHS[-1], *_UP_WIDTHS[:-1]), reversed(_WIDTHS[:-1])
        self.up_stages = nn.ModuleList(
            UpBlock(in_width, skip, width, repeats=1 if width == _UP_WIDTHS[-1] else 2)
            for in_width, skip, width in zip(inputs, skips, _UP_WIDTHS, strict=True)
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        """Return (N, _UP_WIDTHS[-1], h, w) at the resolution of the first feature map."""
        *skips, x = features
        for stage, skip in zip(self.up_stages, reversed(skips), strict=True):
            x = stage(x, skip)
        return x


class UNet(Network):
    """U-Net. Build it with `unet`.

    Parameter names match those in SuperGradients' checkpoints. The backbone is `encoder.backbone`.

    Args:
        num_classes: number of output channels.
        in_channels: number of image channels.
        dropout: dropout probability before the classifier; used only during training.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _classifiers = r"seg_head\.0\.seg_head\.2"
    _finetuned = ("seg_head",)

    def __init__(self, num_classes: int, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__(num_classes)
        self.encoder = nn.Sequential(OrderedDict(backbone=Backbone(in_channels)))
        self.decoder = Decoder()
        # The head is in a Sequential to match checkpoints, in which an upsampling module follows the head.
        head = SegmentationHead(_UP_WIDTHS[-1], _UP_WIDTHS[-1], num_classes, dropout)
        self.seg_head = nn.Sequential(head)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, num_classes, H, W) for images (N, in_channels, H, W) of at least 16 x 16 pixels.

        Raises:
            ModelError: if the images are smaller than 16 x 16 pixels.
        """
        check_size("U-Net", x, 16)
        return self.seg_head(self.decoder(self.encoder(x)))


@MODELS.register_module()
def unet(
    num_classes: int = 1, in_channels: int = 3, dropout: float = 0.0, use_aux_heads: bool = False
) -> UNet:
    """Return U-Net (13.3 million parameters); see `UNet`.

    Raises:
        ConfigError: if `use_aux_heads` is True, because U-Net has no auxiliary heads.
    """
    if use_aux_heads:
        raise ConfigError("must be False, because U-Net has no auxiliary heads", "use_aux_heads")
    return UNet(num_classes, in_channels, dropout)
