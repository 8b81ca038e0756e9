"""Layers shared by several networks in the zoo.

Parameter names (`seq.conv`, `seq.bn`, `seg_head`) match SuperGradients', so its checkpoints can be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.losses import interpolate


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """`nn.AdaptiveAvgPool2d`, computed as matrix products if deterministic algorithms are enabled.

    On CUDA, torch has no deterministic kernel for the gradient of this operation.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, C, *output_size) for `x` of shape (N, C, H, W), or (C, *output_size) for (C, H, W)."""
        if not torch.are_deterministic_algorithms_enabled():
            return super().forward(x)
        size = (
            self.output_size if isinstance(self.output_size, tuple) else (self.output_size, self.output_size)
        )
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows, columns = (
            _bin_weights(length, bins or length, x.device, dtype)
            for length, bins in zip(x.shape[-2:], size, strict=True)
        )
        with torch.autocast(x.device.type, enabled=False):
            # TF32 represents the zeros and ones in `rows` and `columns` exactly.
            sums = rows @ x.to(dtype) @ columns.T
            return (sums / (rows.sum(1)[:, None] * columns.sum(1))).to(x.dtype)


def _bin_weights(length: int, bins: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a matrix (bins, length) that is 1 where an adaptive pooling bin contains the element, and 0 elsewhere."""
    index = torch.arange(bins, device=device)[:, None]
    position = torch.arange(length, device=device)
    inside = (position >= index * length // bins) & (position < -((index + 1) * -length // bins))
    return inside.to(dtype)


class ConvBlock(nn.Sequential):
    """A convolution (no bias, padding `kernel_size // 2`), followed by BatchNorm and, if `relu` is True, ReLU.

    The output has shape (N, out_channels, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        groups: int = 1,
        relu: bool = True,
    ) -> None:
        conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, kernel_size // 2, groups=groups, bias=False
        )
        layers: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels))
        if relu:
            layers["act"] = nn.ReLU(inplace=True)
        super().__init__(layers)


class ConvBNReLU(nn.Module):
    """A `ConvBlock` stored in the `seq` submodule."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        groups: int = 1,
        relu: bool = True,
    ) -> None:
        super().__init__()
        self.seq = ConvBlock(in_channels, out_channels, kernel_size, stride, groups, relu)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        return self.seq(x)


class SegmentationHead(nn.Module):
    """Maps features (N, in_channels, h, w) to logits (N, num_classes, h, w)."""

    def __init__(self, in_channels: int, mid_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.seg_head = nn.Sequential(
            ConvBNReLU(in_channels, mid_channels),
            nn.Dropout(dropout),
            nn.Conv2d(mid_channels, num_classes, kernel_size=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits at the resolution of `x`."""
        return self.seg_head(x)


def outputs_of(stages: Iterable[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the output of each stage. The input of a stage is the output of the previous stage."""
    features = []
    for stage in stages:
        x = stage(x)
        features.append(x)
    return features


def drop_path(x: Tensor, probability: float, training: bool) -> Tensor:
    """Return `x` with random images set to 0, and the other images scaled to preserve the mean (arXiv 1603.09382).

    If `training` is False, return `x` unchanged.
    """
    if not training or probability == 0:
        return x
    return x * F.dropout(x.new_ones(x.shape[0], 1, 1, 1), probability)


def check_size(network: str, x: Tensor, least: int) -> None:
    """Raise `ModelError` unless the images (N, C, H, W) have at least `least` x `least` pixels."""
    height, width = x.shape[-2:]
    if height < least or width < least:
        raise ModelError(
            f"{network} requires images of at least {least} x {least} pixels, not {height} x {width}; enlarge or pad "
            f"the images, for example with ImgDataPreprocessor(pad_size_divisor={least})"
        )


def resize(x: Tensor, like: Tensor, align_corners: bool = False) -> Tensor:
    """Return `x` interpolated bilinearly to the height and width of `like`; see `slipstream.losses.interpolate`."""
    return interpolate(x, like.shape[-2:], align_corners)


def init_weights(model: nn.Module) -> None:
    """Initialize convolutions with He normal initialization (fan-out, arXiv 1502.01852).

    BatchNorm is initialized with weight 1 and bias 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def check_num_classes(num_classes: int) -> None:
    """Raise `ModelError` unless `num_classes` is at least 1."""
    if num_classes < 1:
        raise ModelError(
            f"num_classes must be at least 1, not {num_classes}; use the dataset's number of classes"
        )
