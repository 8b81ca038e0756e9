"""Networks and losses, registered by name in `MODELS`."""

from slipstream.zoo.binary_losses import BCEDiceLoss, FocalLoss
from slipstream.zoo.ddrnet import DDRNet, ddrnet_23, ddrnet_23_slim, ddrnet_39
from slipstream.zoo.dice_ce_edge import DiceCEEdgeLoss
from slipstream.zoo.distillation import (
    ChannelWiseKnowledgeDistillationLoss,
    KDklDivLoss,
    KDLogitsLoss,
    KDOutput,
    NormalizationAdapter,
    SegKDLoss,
)
from slipstream.zoo.losses import CrossEntropy, MultiHeadCrossEntropy
from slipstream.zoo.pp_liteseg import PPLiteSeg, pp_lite_b_seg, pp_lite_t_seg
from slipstream.zoo.regseg import RegSeg, regseg48
from slipstream.zoo.resnet import ResNet, resnet18, resnet18_cifar, resnet34, resnet50
from slipstream.zoo.segformer import (
    SegFormer,
    segformer_b0,
    segformer_b1,
    segformer_b2,
    segformer_b3,
    segformer_b4,
    segformer_b5,
)
from slipstream.zoo.shelfnet import ShelfNet, shelfnet18_lw, shelfnet34_lw
from slipstream.zoo.shelfnet_loss import ShelfNetOHEMLoss
from slipstream.zoo.smp_networks import SmpSegmentor
from slipstream.zoo.stdc_loss import OhemCELoss, STDCLoss
from slipstream.zoo.stdc_seg import STDCSeg, stdc1_seg, stdc2_seg
from slipstream.zoo.timm_networks import TimmClassifier
from slipstream.zoo.unet import UNet, unet

__all__ = [
    "BCEDiceLoss", "ChannelWiseKnowledgeDistillationLoss", "CrossEntropy", "DDRNet", "DiceCEEdgeLoss",
    "FocalLoss", "KDLogitsLoss", "KDOutput", "KDklDivLoss", "MultiHeadCrossEntropy", "NormalizationAdapter",
    "OhemCELoss", "PPLiteSeg", "RegSeg", "ResNet", "STDCLoss", "STDCSeg", "SegFormer", "SegKDLoss", "ShelfNet",
    "ShelfNetOHEMLoss", "SmpSegmentor", "TimmClassifier", "UNet", "ddrnet_23", "ddrnet_23_slim", "ddrnet_39",
    "pp_lite_b_seg", "pp_lite_t_seg", "regseg48", "resnet18", "resnet18_cifar", "resnet34", "resnet50", "segformer_b0",
    "segformer_b1", "segformer_b2", "segformer_b3", "segformer_b4", "segformer_b5", "shelfnet18_lw",
    "shelfnet34_lw", "stdc1_seg", "stdc2_seg", "unet",
]  # fmt: skip
