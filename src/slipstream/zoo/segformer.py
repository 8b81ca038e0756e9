"""SegFormer, a segmentation network with a hierarchical transformer (arXiv 2105.15203)."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.registry import MODELS
from slipstream.zoo.layers import check_size, drop_path, resize
from slipstream.zoo.network import Network

_SMALL = (32, 64, 160, 256)
_LARGE = (64, 128, 320, 512)
_HEADS = (1, 2, 5, 8)
_REDUCTIONS = (8, 4, 2, 1)
_STRIDES = (4, 2, 2, 2)

# Tokens always have the shape (N, h, w, C). Their (N, C, h, w) views for convolutions use the channels_last format.


def _image(tokens: Tensor) -> Tensor:
    return tokens.permute(0, 3, 1, 2)


def _tokens(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1)


class PatchEmbed(nn.Module):
    """Embeds overlapping patches with a convolution whose stride is smaller than its kernel, and applies LayerNorm."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        kernel_size = 2 * stride - 1
        self.proj = nn.Conv2d(in_channels, width, kernel_size, stride, padding=kernel_size // 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        """Return tokens (N, ceil(H / stride), ceil(W / stride), width)."""
        return self.norm(_tokens(self.proj(image)))


class EfficientSelfAttention(nn.Module):
    """Self-attention whose keys and values have a resolution reduced by the factor `reduction`."""

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.sr = nn.Conv2d(width, width, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(width) if reduction > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, h, w, C) for `x` of shape (N, h, w, C), where h and w are at least `reduction`."""
        reduced = x
        if self.sr is not None and self.norm is not None:
            reduced = self.norm(_tokens(self.sr(_image(x))))
        keys, values = self.kv(reduced).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(self._split(self.q(x)), self._split(keys), self._split(values))
        return self.proj(out.transpose(1, 2).reshape(x.shape))

    def _split(self, x: Tensor) -> Tensor:
        """Return (N, heads, h * w, C / heads)."""
        heads: Tensor = x.flatten(1, 2).unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class MixFFN(nn.Module):
    """A feed-forward layer with a 3x3 depthwise convolution, which provides positional information."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 4 * width
        self.fc1 = nn.Linear(width, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, h, w, C) for `x` of shape (N, h, w, C)."""
        return self.fc2(F.gelu(_tokens(self.dwconv(_image(self.fc1(x))))))


class EncoderBlock(nn.Module):
    """Attention and feed-forward layers, each with LayerNorm and a shortcut.

    In training, each layer is skipped with probability `drop_path`, independently for each image (arXiv 1603.09382).
    """

    def __init__(self, width: int, heads: int, reduction: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = EfficientSelfAttention(width, heads, reduction)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MixFFN(width)
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, h, w, C) for `x` of shape (N, h, w, C)."""
        x = x + drop_path(self.attn(self.norm1(x)), self.drop_path, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.drop_path, self.training)


class MixTransformer(nn.Module):
    """The encoder: four stages at 1/4, 1/8, 1/16 and 1/32 of the resolution."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], drop_path: float) -> None:
        super().__init__()
        last = sum(depths) - 1
        rates = (drop_path * index / last for index in range(sum(depths)))
        in_channels = 3
        stages = zip(widths, depths, _HEADS, _REDUCTIONS, _STRIDES, strict=True)
        for number, (width, depth, heads, reduction, stride) in enumerate(stages, start=1):
            blocks = (EncoderBlock(width, heads, reduction, next(rates)) for _ in range(depth))
            self.add_module(f"patch_embed{number}", PatchEmbed(in_channels, width, stride))
            self.add_module(f"block{number}", nn.Sequential(*blocks))
            self.add_module(f"norm{number}", nn.LayerNorm(width))
            in_channels = width

    def forward(self, image: Tensor) -> list[Tensor]:
        """Return the tokens of each stage; the first has shape (N, ceil(H / 4), ceil(W / 4), widths[0])."""
        features = []
        for number in range(1, len(_STRIDES) + 1):
            embed, blocks, norm = (
                getattr(self, f"{part}{number}") for part in ("patch_embed", "block", "norm")
            )
            features.append(norm(blocks(embed(image))))
            image = _image(features[-1])
        return features


class FuseConv(nn.Conv2d):
    """A 1x1 convolution over concatenated feature maps, which are resized to the size of the last map.

    Each map is convolved with its part of the weights before resizing. The result is the same, because both
    operations are linear and act on different dimensions. Most of the work is done at low resolution, and the
    concatenation is not stored.
    """

    def forward(self, images: list[Tensor]) -> Tensor:  # type: ignore[override]
        """Return (N, out_channels, h, w) at the size of the last feature map."""
        weights = self.weight.chunk(len(images), dim=1)
        parts = [F.conv2d(image, weight) for image, weight in zip(images, weights, strict=True)]
        out = parts[-1] if self.bias is None else parts[-1] + self.bias[:, None, None]
        for part in parts[:-1]:
            out = out + resize(part, out)
        return out


class DecodeHead(nn.Module):
    """The all-MLP decoder: it projects features to one width, resizes them to 1/4, and fuses and classifies them."""

    def __init__(self, widths: tuple[int, ...], width: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        for number, in_channels in enumerate(widths, start=1):
            self.add_module(
                f"linear_c{number}", nn.Sequential(OrderedDict(proj=nn.Linear(in_channels, width)))
            )
        fuse = FuseConv(len(widths) * width, width, 1, bias=False)
        layers = OrderedDict(conv=fuse, bn=nn.BatchNorm2d(width), act=nn.ReLU(inplace=True))
        self.linear_fuse = nn.Sequential(OrderedDict(seq=nn.Sequential(layers)))
        self.linear_pred = nn.Conv2d(width, num_classes, 1)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, features: list[Tensor]) -> Tensor:
        """Return logits (N, num_classes, h, w) at the resolution of the first feature map."""
        images = [_image(getattr(self, f"linear_c{n}")(tokens)) for n, tokens in enumerate(features, start=1)]
        return self.linear_pred(self.dropout(self.linear_fuse(images[::-1])))


class SegFormer(Network):
    """SegFormer. Build it with one of the functions from `segformer_b0` to `segformer_b5`.

    Parameter names match those in SuperGradients' checkpoints. The encoder is `_backbone`.

    Args:
        num_classes: number of output channels.
        widths: number of channels in each of the encoder's four stages.
        depths: number of blocks in each stage.
        head_width: number of channels in the decoder.
        drop_path: probability of skipping a layer of the last block during training. The probability increases
            linearly from 0 in the first block to this value.
        dropout: probability of zeroing a channel before the classifier; used only during training.

    Raises:
        ModelError: if `num_classes` is less than 1.
    """

    _classifiers = r"decode_head\.linear_pred"
    _finetuned = _replaced_heads = ("decode_head",)

    def __init__(
        self,
        num_classes: int,
        widths: tuple[int, int, int, int],
        depths: tuple[int, int, int, int],
        head_width: int,
        drop_path: float = 0.1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(num_classes)
        self._backbone = MixTransformer(widths, depths, drop_path)
        self.decode_head = DecodeHead(widths, head_width, num_classes, dropout)
        _init_weights(self)

    def heads(self, x: Tensor) -> Tensor:
        """Return logits (N, num_classes, h, w) at 1/4 of the resolution of images (N, 3, H, W).

        The images must have at least 32 x 32 pixels.

        Raises:
            ModelError: if the images are smaller than 32 x 32 pixels.
        """
        check_size("SegFormer", x, 32)
        logits: Tensor = self.decode_head(self._backbone(x))
        return logits


def _init_weights(model: nn.Module) -> None:
    """Initialize linear layers (standard deviation 0.02), convolutions (He et al., fan-out), and biases (0)."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)


@MODELS.register_module()
def segformer_b0(num_classes: int = 19, drop_path: float = 0.1, dropout: float = 0.1) -> SegFormer:
    """Return SegFormer-B0 (3.7 million parameters); see `SegFormer`."""
    return SegFormer(num_classes, _SMALL, (2, 2, 2, 2), 256, drop_path, dropout)


@MODELS.register_module()
def segformer_b1(num_classes: int = 19, drop_path: float = 0.1, dropout: float = 0.1) -> SegFormer:
    """Return SegFormer-B1 (13.7 million parameters); see `SegFormer`."""
    return SegFormer(num_classes, _LARGE, (2, 2, 2, 2), 256, drop_path, dropout)


@MODELS.register_module()
def segformer_b2(num_classes: int = 19, drop_path: float = 0.1, dropout: float = 0.1) -> SegFormer:
    """Return SegFormer-B2 (27.4 million parameters); see `SegFormer`."""
    return SegFormer(num_classes, _LARGE, (3, 4, 6, 3), 768, drop_path, dropout)


@MODELS.register_module()
def segformer_b3(num_classes: int = 19, drop_path: float = 0.1, dropout: float = 0.1) -> SegFormer:
    """Return SegFormer-B3 (47.2 million parameters); see `SegFormer`."""
    return SegFormer(num_classes, _LARGE, (3, 4, 18, 3), 768, drop_path, dropout)


@MODELS.register_module()
def segformer_b4(num_classes: int = 19, drop_path: float = 0.1, dropout: float = 0.1) -> SegFormer:
    """Return SegFormer-B4 (64.0 million parameters); see `SegFormer`."""
    return SegFormer(num_classes, _LARGE, (3, 8, 27, 3), 768, drop_path, dropout)


@MODELS.register_module()
def segformer_b5(num_classes: int = 19, drop_path: float = 0.1, dropout: float = 0.1) -> SegFormer:
    """Return SegFormer-B5 (84.6 million parameters); see `SegFormer`."""
    return SegFormer(num_classes, _LARGE, (3, 6, 40, 3), 768, drop_path, dropout)
