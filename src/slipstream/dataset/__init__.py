"""Data sets, transforms and data loaders."""

from slipstream.dataset.loading.collate import default_collate, pseudo_collate
from slipstream.dataset.loading.loader import build_dataloader, set_epoch
from slipstream.dataset.loading.sample_index import SampleIndex, sample_rng
from slipstream.dataset.loading.samplers import DefaultSampler, InfiniteSampler
from slipstream.dataset.sources.base import Sample, SegmentationDataset, Transform, default_palette
from slipstream.dataset.sources.cache import DecodeCache
from slipstream.dataset.sources.cifar10 import CIFAR10
from slipstream.dataset.sources.cityscapes import CityscapesDataset
from slipstream.dataset.sources.cityscapes_classes import (
    CITYSCAPES_CLASSES,
    CITYSCAPES_IGNORE_INDEX,
    CITYSCAPES_PALETTE,
)
from slipstream.dataset.sources.fashion_mnist import FashionMNIST
from slipstream.dataset.sources.image_folder import ImageMaskFolder
from slipstream.dataset.sources.wrappers import AtLeast, ClassBalancedDataset, ConcatDataset, RepeatDataset
from slipstream.dataset.transforms.device_transforms import apply_device_transforms
from slipstream.dataset.transforms.geometry import (
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
from slipstream.dataset.transforms.image_transforms import (
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    ToTensor,
)
from slipstream.dataset.transforms.pipeline import apply_transforms

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
    "ToTensor",
    "Transform",
    "apply_device_transforms",
    "apply_transforms",
    "build_dataloader",
    "default_collate",
    "default_palette",
    "pseudo_collate",
    "sample_rng",
    "set_epoch",
]
