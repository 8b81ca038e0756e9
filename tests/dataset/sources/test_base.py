from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from slipstream.dataset import SampleIndex, SegmentationDataset, default_palette

AUGMENTATION = [
    {"type": "SegColorJitter", "brightness": 0.5, "contrast": 0.5, "saturation": 0.5},
    {"type": "SegRandomFlip"},
    {"type": "SegRandomRescale", "scales": (0.5, 2.0)},
    {"type": "SegPadShortToCropSize", "crop_size": (24, 16), "fill_mask": 255, "padding_mode": "random"},
    {"type": "SegCropImageAndMask", "crop_size": (24, 16)},
]


class Noise(SegmentationDataset):
    def __init__(self, length=6, ids=4, **kwargs):
        super().__init__(**kwargs)
        self.length, self.ids, self.loads = length, ids, 0
        self.metainfo = {"classes": tuple("abcd"), "palette": default_palette(4), "ignore_index": 255}

    def __len__(self):
        return self.length

    def load(self, index):
        self.loads += 1
        rng = np.random.default_rng(index)
        image = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        return image, rng.integers(0, self.ids, (20, 30), dtype=np.uint8)


class Order:
    def __init__(self, epoch, seed=7, length=6):
        self.indices = [SampleIndex(i, seed, epoch) for i in reversed(range(length))]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def batches(dataset, epoch, workers=0, seed=7):
    loader = DataLoader(dataset, batch_size=2, sampler=Order(epoch, seed), num_workers=workers)
    return [(batch["inputs"], batch["targets"]) for batch in loader]


def same(ours, theirs):
    return all(
        torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_sample_is_the_loaded_pair_as_channel_first_tensors():
    dataset = Noise()
    image, mask = dataset.load(3)
    sample = dataset[3]
    assert list(sample) == ["inputs", "targets"]
    assert sample["inputs"].dtype == sample["targets"].dtype == torch.uint8
    assert sample["inputs"].is_contiguous()
    for channel in range(3):
        np.testing.assert_array_equal(sample["inputs"][channel].numpy(), image[:, :, channel])
    np.testing.assert_array_equal(sample["targets"].numpy(), mask)


def test_augmentation_depends_only_on_seed_epoch_and_index():
    first = batches(Noise(transforms=AUGMENTATION), epoch=1)
    other_object = Noise(transforms=AUGMENTATION)
    _ = other_object[0], other_object[5]
    np.random.seed(0)
    torch.manual_seed(0)
    assert same(first, batches(other_object, epoch=1))
    assert not same(first, batches(other_object, epoch=2))
    assert not same(first, batches(other_object, epoch=1, seed=8))


def test_indices_out_of_range_raise_index_error():
    dataset = Noise()
    assert len(list(dataset)) == 6
    with pytest.raises(IndexError, match="Noise has 6 samples, and no sample 6"):
        dataset[6]
    with pytest.raises(IndexError):
        dataset[-1]


def test_cache_in_memory_loads_once_and_returns_the_same_samples():
    plain, cached = Noise(transforms=AUGMENTATION), Noise(transforms=AUGMENTATION, cache_in_memory=True)
    for epoch in range(3):
        assert same(batches(plain, epoch), batches(cached, epoch))
    assert (plain.loads, cached.loads) == (18, 6)


def test_transform_cannot_modify_the_cache():
    def darken(sample, rng):
        sample["image"][:] = 0
        return sample

    dataset = Noise(transforms=[darken], cache_in_memory=True)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0]


def test_get_cat_ids_excludes_the_ignored_id():
    class Two(Noise):
        def load(self, index):
            image, mask = super().load(index)
            return image, np.where(mask < 2, 255, mask).astype(np.uint8)

    assert Two().get_cat_ids(0) == [2, 3]
