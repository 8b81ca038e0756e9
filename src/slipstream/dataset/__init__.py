"""Where samples come from: data sets, augmentations, and how samples become batches."""

from slipstream.dataset.base import Sample, SegmentationDataset, Transform, default_palette
from slipstream.dataset.cityscapes_classes import (
    CITYSCAPES_CLASSES,
    CITYSCAPES_IGNORE_INDEX,
    CITYSCAPES_PALETTE,
)
from slipstream.dataset.collate import default_collate, pseudo_collate
from slipstream.dataset.fashion_mnist import FashionMNIST
from slipstream.dataset.image_folder import ImageMaskFolder
from slipstream.dataset.loader import build_dataloader
from slipstream.dataset.sample_index import SampleIndex, sample_rng
from slipstream.dataset.samplers import DefaultSampler, InfiniteSampler
from slipstream.dataset.street_scenes import StreetScenes, draw_street_scene
from slipstream.dataset.transforms import (
    SegColorJitter,
    SegCropImageAndMask,
    SegPadShortToCropSize,
    SegRandomFlip,
    SegRandomRescale,
    SegRescale,
)
from slipstream.dataset.wrappers import ClassBalancedDataset, ConcatDataset, RepeatDataset

__all__ = [
    "CITYSCAPES_CLASSES",
    "CITYSCAPES_IGNORE_INDEX",
    "CITYSCAPES_PALETTE",
    "ClassBalancedDataset",
    "ConcatDataset",
    "DefaultSampler",
    "FashionMNIST",
    "ImageMaskFolder",
    "InfiniteSampler",
    "RepeatDataset",
    "Sample",
    "SampleIndex",
    "SegColorJitter",
    "SegCropImageAndMask",
    "SegPadShortToCropSize",
    "SegRandomFlip",
    "SegRandomRescale",
    "SegRescale",
    "SegmentationDataset",
    "StreetScenes",
    "Transform",
    "build_dataloader",
    "default_collate",
    "default_palette",
    "draw_street_scene",
    "pseudo_collate",
    "sample_rng",
]
