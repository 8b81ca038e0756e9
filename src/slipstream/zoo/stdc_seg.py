"""STDC-Seg, a real-time segmentation network with a detail head that is used only in training (arXiv 2104.13188)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from slipstream.registry import MODELS
from slipstream.zoo.layers import ConvBNReLU, SegmentationHead, init_weights
from slipstream.zoo.network import Network
from slipstream.zoo.stdc import STDC1_BLOCKS, STDC2_BLOCKS, STDCBackbone

_CONTEXT_CHANNELS = 128
_FUSED_CHANNELS = 256
_HIDDEN_CHANNELS = 64


class AttentionRefinement(nn.Module):
    """A convolution whose output channels are gated by their global means."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv_first = ConvBNReLU(in_channels, out_channels)
        self.attention_block = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            ConvBNReLU(out_channels, out_channels, kernel_size=1, relu=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, h, w) for `x` of shape (N, in_channels, h, w)."""
        x = self.conv_first(x)
        return x * self.attention_block(x)


class ContextPath(nn.Module):
    """The backbone and its context, which is upsampled from 1/32 via 1/16 to 1/8 of the resolution."""

    def __init__(self, backbone: STDCBackbone, channels: int) -> None:
        super().__init__()
        self.backbone = backbone
        _, width16, width32 = backbone.out_channels
        # The projected global mean of the features. The name occurs twice to match checkpoints.
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvBNReLU(width32, channels, kernel_size=1))
        self.context_embedding = nn.Sequential(OrderedDict(context_embedding=pool))
        self.arm32 = AttentionRefinement(width32, channels)
        self.arm16 = AttentionRefinement(width16, channels)
        self.upsample32 = nn.Sequential(nn.Upsample(scale_factor=2), ConvBNReLU(channels, channels))
        self.upsample16 = nn.Sequential(nn.Upsample(scale_factor=2), ConvBNReLU(channels, channels))

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the backbone's features at 1/8, 1/16 and 1/32 of the resolution of `x`, and the context at 1/8."""
        features = self.backbone(x)
        feature8, feature16, feature32 = features
        context = self.arm32(feature32) + self.context_embedding(feature32)
        context = self.arm16(feature16) + _crop(self.upsample32(context), feature16)
        return features, _crop(self.upsample16(context), feature8)


def _crop(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` cropped to the size of `like`. If a side of `like` is odd, that side of `x` is one pixel longer."""
    height, width = like.shape[-2:]
    return x[..., :height, :width]


class FeatureFusion(nn.Module):
    """Fuses the details and the context, and scales each channel by 1 plus a gate computed from all channel means."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        hidden = out_channels // 4
        self.pw_conv = ConvBNReLU(in_channels, out_channels, kernel_size=1)
        squeeze = OrderedDict(conv=nn.Conv2d(out_channels, hidden, 1, bias=False), act=nn.ReLU(inplace=True))
        self.attention_block = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Sequential(OrderedDict(seq=nn.Sequential(squeeze))),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, details: Tensor, context: Tensor) -> Tensor:
        """Return (N, out_channels, h, w) at the resolution of both inputs."""
        x = self.pw_conv(torch.cat([details, context], dim=1))
        return x + x * self.attention_block(x)


class STDCSeg(Network):
    """STDC-Seg. Build it with `stdc1_seg` or `stdc2_seg`.

    Parameter names match those in SuperGradients' checkpoints. The backbone is `cp.backbone`. Training requires at
    least two images per batch (with SyncBatchNorm, across all processes), because BatchNorm is applied to globally
    pooled features.

    Args:
        num_classes: number of output channels.
        blocks: number of STDC blocks in each of the last three stages of the backbone.
        use_aux_heads: whether to add auxiliary heads, which are used only during training, to the backbone's features.
        dropout: dropout probability before the classifiers; used only during training.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _align_corners = True
    _classifiers = r"(segmentation_head|aux_head_s16|aux_head_s32)\.0\.seg_head\.2"
    _finetuned = _replaced_heads = ("segmentation_head", "aux_head", "detail_head")

    def __init__(
        self,
        num_classes: int,
        blocks: tuple[int, int, int],
        use_aux_heads: bool = True,
        dropout: float = 0.2,
    ) -> None:
        super().__init__(num_classes)
        self.use_aux_heads = use_aux_heads
        self.cp = ContextPath(STDCBackbone(blocks), _CONTEXT_CHANNELS)
        width8, width16, width32 = self.cp.backbone.out_channels
        self.ffm = FeatureFusion(width8 + _CONTEXT_CHANNELS, _FUSED_CHANNELS)
        self.segmentation_head = _head(_FUSED_CHANNELS, _FUSED_CHANNELS, num_classes, dropout)
        if use_aux_heads:
            self.aux_head_s16 = _head(width16, _HIDDEN_CHANNELS, num_classes, dropout)
            self.aux_head_s32 = _head(width32, _HIDDEN_CHANNELS, num_classes, dropout)
            self.detail_head8 = _head(width8, _HIDDEN_CHANNELS, 1, dropout)
        init_weights(self)

    def _remove_auxiliary_heads(self) -> None:
        if self.use_aux_heads:
            del self.aux_head_s16, self.aux_head_s32, self.detail_head8
        self.use_aux_heads = False

    def heads(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return logits (N, num_classes, h, w) at 1/8 of the resolution of images (N, 3, H, W) of any size.

        In training mode with auxiliary heads, return the tuple (main, aux at 1/32, aux at 1/16, detail at 1/8). Detail
        logits have one channel. Use `STDCLoss` for these outputs.
        """
        (feature8, feature16, feature32), context = self.cp(x)
        main = self.segmentation_head(self.ffm(feature8, context))
        if not (self.training and self.use_aux_heads):
            return main
        return main, self.aux_head_s32(feature32), self.aux_head_s16(feature16), self.detail_head8(feature8)


def _head(in_channels: int, hidden: int, num_classes: int, dropout: float) -> nn.Sequential:
    # The head is in a Sequential to match checkpoints, in which an upsampling module follows the head.
    return nn.Sequential(SegmentationHead(in_channels, hidden, num_classes, dropout))


@MODELS.register_module(["stdc1_seg", "stdc1_seg50", "stdc1_seg75"])
def stdc1_seg(num_classes: int = 19, use_aux_heads: bool = True, dropout: float = 0.2) -> STDCSeg:
    """Return STDC1-Seg (8.3 million parameters at inference); see `STDCSeg`."""
    return STDCSeg(num_classes, STDC1_BLOCKS, use_aux_heads, dropout)


@MODELS.register_module(["stdc2_seg", "stdc2_seg50", "stdc2_seg75"])
def stdc2_seg(num_classes: int = 19, use_aux_heads: bool = True, dropout: float = 0.2) -> STDCSeg:
    """Return STDC2-Seg (12.3 million parameters at inference); see `STDCSeg`."""
    return STDCSeg(num_classes, STDC2_BLOCKS, use_aux_heads, dropout)
