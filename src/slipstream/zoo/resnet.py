"""ResNet (arXiv 1512.03385) with torchvision's parameter names, so that torchvision's weights can be loaded."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.registry import MODELS
from slipstream.typecheck import Probability, check
from slipstream.zoo.layers import drop_path, init_weights
from slipstream.zoo.network import Network


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def _conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_conv1x1(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, droppath_prob: float = 0.0) -> None:
        super().__init__()
        self.droppath_prob = droppath_prob
        self.conv1 = _conv3x3(in_channels, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, width, ceil(H / stride), ceil(W / stride))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = drop_path(self.bn2(self.conv2(out)), self.droppath_prob, self.training)
        return F.relu(out + shortcut, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut. The 3x3 convolution applies the stride (ResNet v1.5)."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, droppath_prob: float = 0.0) -> None:
        super().__init__()
        self.droppath_prob = droppath_prob
        out_channels = width * self.expansion
        self.conv1 = _conv1x1(in_channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, out_channels)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 4 * width, ceil(H / stride), ceil(W / stride))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = drop_path(self.bn3(self.conv3(out)), self.droppath_prob, self.training)
        return F.relu(out + shortcut, inplace=True)


class ResNet(Network):
    """A stem, four stages of residual blocks, global average pooling and a linear classifier.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: number of blocks in each stage.
        num_classes: number of classes.
        in_channels: number of image channels.
        small_input: whether to use a stem for images of about 32x32 pixels: a 3x3 convolution with stride 1, instead
            of a 7x7 convolution with stride 2 followed by max-pooling.
        droppath_prob: probability of skipping a block in training, independently for each image.

    Raises:
        ModelError: if `num_classes` is less than 1.
        ConfigError: if `droppath_prob` is out of range.
    """

    task = "classification"
    _classifiers = "fc"
    _finetuned = ("fc",)

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int = 1000,
        in_channels: int = 3,
        small_input: bool = False,
        droppath_prob: float = 0.0,
    ) -> None:
        super().__init__(num_classes)
        check(droppath_prob, Probability, "droppath_prob")
        if small_input:
            self.conv1 = _conv3x3(in_channels, 64)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(block, 64, 64, depths[0], 1, droppath_prob)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], 2, droppath_prob)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], 2, droppath_prob)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], 2, droppath_prob)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, num_classes) for images (N, in_channels, H, W)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    width: int,
    depth: int,
    stride: int,
    droppath_prob: float,
) -> nn.Sequential:
    rest = (block(width * block.expansion, width, 1, droppath_prob) for _ in range(depth - 1))
    return nn.Sequential(block(in_channels, width, stride, droppath_prob), *rest)


@MODELS.register_module()
def resnet18(
    num_classes: int = 1000, in_channels: int = 3, small_input: bool = False, droppath_prob: float = 0.0
) -> ResNet:
    """Return ResNet-18 (11.7 million parameters for 1000 classes); see `ResNet`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels, small_input, droppath_prob)


@MODELS.register_module()
def resnet18_cifar(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """Return ResNet-18 for images of 32x32 pixels (11.2 million parameters for 10 classes); see `ResNet`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels, small_input=True)


@MODELS.register_module()
def resnet34(
    num_classes: int = 1000, in_channels: int = 3, small_input: bool = False, droppath_prob: float = 0.0
) -> ResNet:
    """Return ResNet-34 (21.8 million parameters for 1000 classes); see `ResNet`."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_channels, small_input, droppath_prob)


@MODELS.register_module()
def resnet50(
    num_classes: int = 1000, in_channels: int = 3, small_input: bool = False, droppath_prob: float = 0.0
) -> ResNet:
    """Return ResNet-50 v1.5 (25.6 million parameters for 1000 classes); see `ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels, small_input, droppath_prob)
