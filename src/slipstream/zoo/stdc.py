"""The STDC backbone (Short-Term Dense Concatenate, arXiv 2104.13188)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.zoo.layers import ConvBNReLU, outputs_of

STDC1_BLOCKS = (2, 2, 2)
STDC2_BLOCKS = (4, 5, 3)


class STDCBlock(nn.Module):
    """Four consecutive convolutions with 1/2, 1/4, 1/8 and 1/8 of `out_channels`, whose outputs are concatenated.

    With `stride` 2, the first output is average-pooled before concatenation, and a depthwise convolution halves the
    resolution before the second convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half, quarter, eighth = out_channels // 2, out_channels // 4, out_channels // 8
        second: nn.Module = ConvBNReLU(half, quarter)
        if stride == 2:
            second = nn.Sequential(ConvBNReLU(half, half, stride=2, groups=half, relu=False), second)
        self.conv_list = nn.ModuleList(
            [
                ConvBNReLU(in_channels, half, kernel_size=1),
                second,
                ConvBNReLU(quarter, eighth),
                ConvBNReLU(eighth, eighth),
            ]
        )
        self.pool = nn.AvgPool2d(3, stride=2, padding=1) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        first, second, third, fourth = self.conv_list
        a = first(x)
        b = second(a)
        c = third(b)
        return torch.cat([self.pool(a), b, c, fourth(c)], dim=1)


class STDCBackbone(nn.Module):
    """Five stages that each halve the resolution. The last three consist of `blocks` STDC blocks.

    The outputs of the last three stages have `out_channels` (256, 512 and 1024) channels.
    """

    out_channels = (256, 512, 1024)

    def __init__(self, blocks: tuple[int, int, int], in_channels: int = 3) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(
            {
                "block_s2": nn.Sequential(ConvBNReLU(in_channels, 32, stride=2)),
                "block_s4": nn.Sequential(ConvBNReLU(32, 64, stride=2)),
            }
        )
        width = 64
        for scale, count, out_width in zip((8, 16, 32), blocks, self.out_channels, strict=True):
            rest = [STDCBlock(out_width, out_width, stride=1) for _ in range(count - 1)]
            self.stages[f"block_s{scale}"] = nn.Sequential(STDCBlock(width, out_width, stride=2), *rest)
            width = out_width

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features at 1/8, 1/16 and 1/32 of the resolution of `x`, with sizes rounded up."""
        return outputs_of(self.stages.values(), x)[-3:]
