"""Where samples come from: data sets, augmentations, and how samples become batches."""

from slipstream.dataset.base import Sample, SegmentationDataset, Transform, default_palette
from slipstream.dataset.cache import DecodeCache
from slipstream.dataset.cifar10 import CIFAR10
from slipstream.dataset.cityscapes import CityscapesDataset
from slipstream.dataset.cityscapes_classes import (
    CITYSCAPES_CLASSES,
    CITYSCAPES_IGNORE_INDEX,
    CITYSCAPES_PALETTE,
)
from slipstream.dataset.collate import default_collate, pseudo_collate
from slipstream.dataset.fashion_mnist import FashionMNIST
from slipstream.dataset.finish import finish_batch
from slipstream.dataset.image_folder import ImageMaskFolder
from slipstream.dataset.image_transforms import Normalize, RandomCrop, RandomHorizontalFlip, ToTensor
from slipstream.dataset.loader import build_dataloader, set_epoch
from slipstream.dataset.pipeline import apply_transforms
from slipstream.dataset.sample_index import SampleIndex, sample_rng
from slipstream.dataset.samplers import DefaultSampler, InfiniteSampler
from slipstream.dataset.street_scenes import StreetScenes, draw_street_scene
from slipstream.dataset.transforms import (
    SegColorJitter,
    SegConvertToTensor,
    SegCropImageAndMask,
    SegNormalize,
    SegPadShortToCropSize,
    SegRandomFlip,
    SegRandomRescale,
    SegRescale,
    SegStandardize,
)
from slipstream.dataset.wrappers import AtLeast, ClassBalancedDataset, ConcatDataset, RepeatDataset

__all__ = [
    "CIFAR10",
    "CITYSCAPES_CLASSES",
    "CITYSCAPES_IGNORE_INDEX",
    "CITYSCAPES_PALETTE",
    "AtLeast",
    "CityscapesDataset",
    "ClassBalancedDataset",
    "ConcatDataset",
    "DecodeCache",
    "DefaultSampler",
    "FashionMNIST",
    "ImageMaskFolder",
    "InfiniteSampler",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RepeatDataset",
    "Sample",
    "SampleIndex",
    "SegColorJitter",
    "SegConvertToTensor",
    "SegCropImageAndMask",
    "SegNormalize",
    "SegPadShortToCropSize",
    "SegRandomFlip",
    "SegRandomRescale",
    "SegRescale",
    "SegStandardize",
    "SegmentationDataset",
    "StreetScenes",
    "ToTensor",
    "Transform",
    "apply_transforms",
    "build_dataloader",
    "default_collate",
    "default_palette",
    "draw_street_scene",
    "finish_batch",
    "pseudo_collate",
    "sample_rng",
    "set_epoch",
]
