"""Datasets, samplers and collate functions."""

from slipstream.dataset import InfiniteSampler
from slipstream.openmmlab.mmengine.dataset.base_dataset import BaseDataset, Compose, force_full_init
from slipstream.openmmlab.mmengine.dataset.dataset_wrapper import (
    ClassBalancedDataset,
    ConcatDataset,
    RepeatDataset,
)
from slipstream.openmmlab.mmengine.dataset.sampler import DefaultSampler
from slipstream.openmmlab.mmengine.dataset.utils import default_collate, pseudo_collate, worker_init_fn

__all__ = [
    "BaseDataset",
    "ClassBalancedDataset",
    "Compose",
    "ConcatDataset",
    "DefaultSampler",
    "InfiniteSampler",
    "RepeatDataset",
    "default_collate",
    "force_full_init",
    "pseudo_collate",
    "worker_init_fn",
]
