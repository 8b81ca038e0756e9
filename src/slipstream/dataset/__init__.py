"""Datasets, transforms and data loaders. Public names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.dataset.loading.collate import default_collate, pseudo_collate
    from slipstream.dataset.loading.generators import SampleIndex, sample_rng
    from slipstream.dataset.loading.loader import build_dataloader, set_epoch
    from slipstream.dataset.loading.samplers import DefaultSampler, InfiniteSampler
    from slipstream.dataset.sources.base import Sample, SegmentationDataset, Transform, default_palette
    from slipstream.dataset.sources.cache import DecodeCache
    from slipstream.dataset.sources.cifar import CIFAR10, CIFAR100
    from slipstream.dataset.sources.cityscapes import CityscapesConcatDataset, CityscapesDataset
    from slipstream.dataset.sources.cityscapes_classes import (
        CITYSCAPES_CLASSES,
        CITYSCAPES_IGNORE_INDEX,
        CITYSCAPES_PALETTE,
    )
    from slipstream.dataset.sources.class_folder import ImageNetDataset
    from slipstream.dataset.sources.coco import CoCoSegmentationDataSet
    from slipstream.dataset.sources.fashion_mnist import FashionMNIST
    from slipstream.dataset.sources.image_folder import ImageMaskFolder
    from slipstream.dataset.sources.supervisely import SuperviselyPersonsDataset
    from slipstream.dataset.sources.webdataset import WebDataset, WebSegmentationDataset
    from slipstream.dataset.sources.wrappers import (
        AtLeast,
        ClassBalancedDataset,
        ConcatDataset,
        RepeatDataset,
    )
    from slipstream.dataset.transforms.device_transforms import apply_device_transforms
    from slipstream.dataset.transforms.geometry import (
        SegColorJitter,
        SegConvertToTensor,
        SegCropImageAndMask,
        SegNormalize,
        SegPadShortToCropSize,
        SegPadToDivisible,
        SegRandomFlip,
        SegRandomRescale,
        SegRescale,
        SegResize,
        SegStandardize,
    )
    from slipstream.dataset.transforms.image_resize import (
        CenterCrop,
        RandomResizedCropAndInterpolation,
        Resize,
    )
    from slipstream.dataset.transforms.image_transforms import (
        Normalize,
        RandomCrop,
        RandomHorizontalFlip,
        ToTensor,
    )
    from slipstream.dataset.transforms.pipeline import apply_transforms
    from slipstream.dataset.transforms.rand_augment import RandAugmentTransform
    from slipstream.dataset.transforms.rotate_blur import SegRandomGaussianBlur, SegRandomRotate

_MODULES = {
    "loading.collate": ["default_collate", "pseudo_collate"],
    "loading.loader": ["build_dataloader", "set_epoch"],
    "loading.generators": ["SampleIndex", "sample_rng"],
    "loading.samplers": ["DefaultSampler", "InfiniteSampler"],
    "sources.base": ["Sample", "SegmentationDataset", "Transform", "default_palette"],
    "sources.cache": ["DecodeCache"],
    "sources.cifar": ["CIFAR10", "CIFAR100"],
    "sources.cityscapes": ["CityscapesConcatDataset", "CityscapesDataset"],
    "sources.class_folder": ["ImageNetDataset"],
    "sources.cityscapes_classes": ["CITYSCAPES_CLASSES", "CITYSCAPES_IGNORE_INDEX", "CITYSCAPES_PALETTE"],
    "sources.coco": ["CoCoSegmentationDataSet"],
    "sources.fashion_mnist": ["FashionMNIST"],
    "sources.image_folder": ["ImageMaskFolder"],
    "sources.supervisely": ["SuperviselyPersonsDataset"],
    "sources.webdataset": ["WebDataset", "WebSegmentationDataset"],
    "sources.wrappers": ["AtLeast", "ClassBalancedDataset", "ConcatDataset", "RepeatDataset"],
    "transforms.device_transforms": ["apply_device_transforms"],
    "transforms.geometry": [
        "SegColorJitter",
        "SegConvertToTensor",
        "SegCropImageAndMask",
        "SegNormalize",
        "SegPadShortToCropSize",
        "SegPadToDivisible",
        "SegRandomFlip",
        "SegRandomRescale",
        "SegRescale",
        "SegResize",
        "SegStandardize",
    ],
    "transforms.image_transforms": ["Normalize", "RandomCrop", "RandomHorizontalFlip", "ToTensor"],
    "transforms.image_resize": ["CenterCrop", "RandomResizedCropAndInterpolation", "Resize"],
    "transforms.pipeline": ["apply_transforms"],
    "transforms.rand_augment": ["RandAugmentTransform"],
    "transforms.rotate_blur": ["SegRandomGaussianBlur", "SegRandomRotate"],
}

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CITYSCAPES_CLASSES",
    "CITYSCAPES_IGNORE_INDEX",
    "CITYSCAPES_PALETTE",
    "AtLeast",
    "CenterCrop",
    "CityscapesConcatDataset",
    "CityscapesDataset",
    "ClassBalancedDataset",
    "CoCoSegmentationDataSet",
    "ConcatDataset",
    "DecodeCache",
    "DefaultSampler",
    "FashionMNIST",
    "ImageMaskFolder",
    "ImageNetDataset",
    "InfiniteSampler",
    "Normalize",
    "RandAugmentTransform",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCropAndInterpolation",
    "RepeatDataset",
    "Resize",
    "Sample",
    "SampleIndex",
    "SegColorJitter",
    "SegConvertToTensor",
    "SegCropImageAndMask",
    "SegNormalize",
    "SegPadShortToCropSize",
    "SegPadToDivisible",
    "SegRandomFlip",
    "SegRandomGaussianBlur",
    "SegRandomRescale",
    "SegRandomRotate",
    "SegRescale",
    "SegResize",
    "SegStandardize",
    "SegmentationDataset",
    "SuperviselyPersonsDataset",
    "ToTensor",
    "Transform",
    "WebDataset",
    "WebSegmentationDataset",
    "apply_device_transforms",
    "apply_transforms",
    "build_dataloader",
    "default_collate",
    "default_palette",
    "pseudo_collate",
    "sample_rng",
    "set_epoch",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"slipstream.dataset.{module}"), name)
    raise AttributeError(f"module 'slipstream.dataset' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
