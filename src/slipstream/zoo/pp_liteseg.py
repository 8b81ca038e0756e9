"""PP-LiteSeg, a real-time segmentation network (arXiv 2204.02681)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from slipstream.registry import MODELS
from slipstream.zoo.layers import AdaptiveAvgPool2d, ConvBNReLU, SegmentationHead, init_weights, resize
from slipstream.zoo.network import Network
from slipstream.zoo.stdc import STDC1_BLOCKS, STDC2_BLOCKS, STDCBackbone

_AUX_CHANNELS = (32, 64, 64)


class SPPM(nn.Module):
    """Simple pyramid pooling: the sum of the features pooled to 1x1, 2x2 and 4x4, followed by a convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(AdaptiveAvgPool2d(size), ConvBNReLU(in_channels, out_channels, kernel_size=1))
            for size in (1, 2, 4)
        )
        self.conv_out = ConvBNReLU(out_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, h, w) for `x` of shape (N, in_channels, h, w)."""
        first, second, third = (resize(branch(x), x) for branch in self.branches)
        return self.conv_out(first + second + third)


class UAFM(nn.Module):
    """Unified attention fusion with spatial attention: blends features and skips with a weight for each pixel."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv_atten = nn.Sequential(ConvBNReLU(4, 2), ConvBNReLU(2, 1, relu=False))
        self.conv_out = ConvBNReLU(in_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return (N, out_channels, h, w) for `x` and `skip` of shape (N, in_channels, h, w)."""
        statistics = [
            reduced
            for features in (x, skip)
            for reduced in (features.mean(1, keepdim=True), features.amax(1, keepdim=True))
        ]
        weight = torch.sigmoid(self.conv_atten(torch.cat(statistics, dim=1)))
        return self.conv_out(skip + weight * (x - skip))


class Encoder(nn.Module):
    """The backbone, projections of its features, and a context module for the deepest features."""

    def __init__(self, backbone: STDCBackbone, skip_channels: tuple[int, int, int]) -> None:
        super().__init__()
        self.backbone = backbone
        self.context_module = SPPM(backbone.out_channels[-1], skip_channels[-1])
        self.proj_convs = nn.ModuleList(
            ConvBNReLU(width, skip) for width, skip in zip(backbone.out_channels, skip_channels, strict=True)
        )

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the skips at 1/8, 1/16 and 1/32 of the resolution of `x`, and the context at 1/32."""
        features = self.backbone(x)
        skips = [project(f) for project, f in zip(self.proj_convs, features, strict=True)]
        return skips, self.context_module(features[-1])


class Decoder(nn.Module):
    """The flexible lightweight decoder, which fuses the skips from deep to shallow with decreasing width.

    The output of each fusion has the width of the next skip. The last output has `out_channels` channels.
    """

    def __init__(self, skip_channels: tuple[int, int, int], out_channels: int) -> None:
        super().__init__()
        widths = [*reversed(skip_channels), out_channels]
        self.up_stages = nn.ModuleList(UAFM(width, out) for width, out in itertools.pairwise(widths))

    def forward(self, skips: list[Tensor], context: Tensor) -> Tensor:
        """Return (N, out_channels, h, w) at the resolution of the first skip."""
        x = context
        for stage, skip in zip(self.up_stages, reversed(skips), strict=True):
            x = stage(x if skip is skips[-1] else resize(x, skip), skip)
        return x


class PPLiteSeg(Network):
    """PP-LiteSeg with an STDC backbone. Build it with `pp_lite_t_seg` or `pp_lite_b_seg`.

    Parameter names match those in SuperGradients' checkpoints. The backbone is `encoder.backbone`.

    Args:
        num_classes: number of output channels.
        blocks: number of STDC blocks in each of the last three stages of the backbone.
        skip_channels: widths of the skips at 1/8, 1/16 and 1/32.
        head_channels: width of the decoder's output and of the classifier's input.
        use_aux_heads: whether to add an auxiliary head to each of the three skips. The auxiliary heads are used only
            during training.
        dropout: dropout probability before the classifiers; used only during training.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _classifiers = r"(seg_head|aux_heads\.\d+)\.0\.seg_head\.2"
    _finetuned = ("seg_head", "aux_heads")

    def __init__(
        self,
        num_classes: int,
        blocks: tuple[int, int, int],
        skip_channels: tuple[int, int, int],
        head_channels: int,
        use_aux_heads: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_classes)
        self.encoder = Encoder(STDCBackbone(blocks), skip_channels)
        self.decoder = Decoder(skip_channels, head_channels)
        # Each head is in a Sequential to match checkpoints, in which an upsampling module follows the head.
        self.seg_head = nn.Sequential(SegmentationHead(head_channels, head_channels, num_classes, dropout))
        self.aux_heads = nn.ModuleList(
            nn.Sequential(SegmentationHead(skip, hidden, num_classes, dropout))
            for skip, hidden in zip(skip_channels, _AUX_CHANNELS, strict=True)
            if use_aux_heads
        )
        init_weights(self)

    def _remove_auxiliary_heads(self) -> None:
        self.aux_heads = nn.ModuleList()

    def heads(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return logits (N, num_classes, h, w) at 1/8 of the resolution of images (N, 3, H, W) of any size.

        In training mode with auxiliary heads, return the tuple (main, aux at 1/8, aux at 1/16, aux at 1/32).
        """
        skips, context = self.encoder(x)
        main = self.seg_head(self.decoder(skips, context))
        if not (self.training and self.aux_heads):
            return main
        return (main, *(head(skip) for head, skip in zip(self.aux_heads, skips, strict=True)))


@MODELS.register_module(["pp_lite_t_seg", "pp_lite_t_seg50", "pp_lite_t_seg75"])
def pp_lite_t_seg(num_classes: int = 19, use_aux_heads: bool = True, dropout: float = 0.0) -> PPLiteSeg:
    """Return PP-LiteSeg-T (STDC1 backbone, 8.0 million parameters at inference); see `PPLiteSeg`."""
    return PPLiteSeg(num_classes, STDC1_BLOCKS, (64, 128, 128), 32, use_aux_heads, dropout)


@MODELS.register_module(["pp_lite_b_seg", "pp_lite_b_seg50", "pp_lite_b_seg75"])
def pp_lite_b_seg(num_classes: int = 19, use_aux_heads: bool = True, dropout: float = 0.0) -> PPLiteSeg:
    """Return PP-LiteSeg-B (STDC2 backbone, 12.2 million parameters at inference); see `PPLiteSeg`."""
    return PPLiteSeg(num_classes, STDC2_BLOCKS, (96, 128, 128), 64, use_aux_heads, dropout)
