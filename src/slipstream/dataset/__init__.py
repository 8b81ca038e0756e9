"""Datasets, transforms and data loaders."""

from slipstream.dataset.loading.collate import default_collate, pseudo_collate
from slipstream.dataset.loading.generators import SampleIndex, sample_rng
from slipstream.dataset.loading.loader import build_dataloader, set_epoch
from slipstream.dataset.loading.samplers import DefaultSampler, InfiniteSampler
from slipstream.dataset.sources.base import Sample, SegmentationDataset, Transform, default_palette
from slipstream.dataset.sources.cache import DecodeCache
from slipstream.dataset.sources.cifar import CIFAR10, CIFAR100
from slipstream.dataset.sources.cityscapes import CityscapesConcatDataset, CityscapesDataset
from slipstream.dataset.sources.cityscapes_labels import (
    CITYSCAPES_CLASSES,
    CITYSCAPES_IGNORE_INDEX,
    CITYSCAPES_PALETTE,
)
from slipstream.dataset.sources.coco import CoCoSegmentationDataSet
from slipstream.dataset.sources.fashion_mnist import FashionMNIST
from slipstream.dataset.sources.image_folder import (
    ImageMaskFolder,
    ImageNetDataset,
    SuperviselyPersonsDataset,
)
from slipstream.dataset.sources.webdataset import WebDataset, WebSegmentationDataset
from slipstream.dataset.sources.wrappers import AtLeast, ClassBalancedDataset, ConcatDataset, RepeatDataset
from slipstream.dataset.transforms.device_transforms import apply_device_transforms
from slipstream.dataset.transforms.geometry import (
    SegColorJitter,
    SegConvertToTensor,
    SegCropImageAndMask,
    SegNormalize,
    SegPadShortToCropSize,
    SegPadToDivisible,
    SegRandomFlip,
    SegRandomGaussianBlur,
    SegRandomRescale,
    SegRandomRotate,
    SegRescale,
    SegResize,
    SegStandardize,
)
from slipstream.dataset.transforms.image_transforms import (
    CenterCrop,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCropAndInterpolation,
    Resize,
    ToTensor,
)
from slipstream.dataset.transforms.pipeline import apply_transforms
from slipstream.dataset.transforms.rand_augment import RandAugmentTransform

__all__ = [
    "CIFAR10", "CIFAR100", "CITYSCAPES_CLASSES", "CITYSCAPES_IGNORE_INDEX", "CITYSCAPES_PALETTE", "AtLeast",
    "CenterCrop", "CityscapesConcatDataset", "CityscapesDataset", "ClassBalancedDataset",
    "CoCoSegmentationDataSet", "ConcatDataset", "DecodeCache", "DefaultSampler", "FashionMNIST",
    "ImageMaskFolder", "ImageNetDataset", "InfiniteSampler", "Normalize", "RandAugmentTransform", "RandomCrop",
    "RandomHorizontalFlip", "RandomResizedCropAndInterpolation", "RepeatDataset", "Resize", "Sample",
    "SampleIndex", "SegColorJitter", "SegConvertToTensor", "SegCropImageAndMask", "SegNormalize",
    "SegPadShortToCropSize", "SegPadToDivisible", "SegRandomFlip", "SegRandomGaussianBlur", "SegRandomRescale",
    "SegRandomRotate", "SegRescale", "SegResize", "SegStandardize", "SegmentationDataset",
    "SuperviselyPersonsDataset", "ToTensor", "Transform", "WebDataset", "WebSegmentationDataset",
    "apply_device_transforms", "apply_transforms", "build_dataloader", "default_collate", "default_palette",
    "pseudo_collate", "sample_rng", "set_epoch",
]  # fmt: skip
