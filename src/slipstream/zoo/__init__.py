"""The recipes' networks and losses: plain modules, registered in `MODELS` by their own names."""

from slipstream.zoo.losses import MultiHeadCrossEntropy
from slipstream.zoo.pp_liteseg import PPLiteSeg, pp_lite_b_seg, pp_lite_t_seg
from slipstream.zoo.resnet import ResNet, resnet18, resnet34, resnet50

__all__ = [
    "MultiHeadCrossEntropy",
    "PPLiteSeg",
    "ResNet",
    "pp_lite_b_seg",
    "pp_lite_t_seg",
    "resnet18",
    "resnet34",
    "resnet50",
]
