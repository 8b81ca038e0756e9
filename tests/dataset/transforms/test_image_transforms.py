from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.dataset import RandomCrop, RandomHorizontalFlip, ToTensor
from slipstream.dataset.transforms.device_transforms import transform_images
from slipstream.dataset.transforms.image_transforms import read_transforms
from slipstream.errors import ConfigError

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]


def image(height=6, width=8):
    return np.random.default_rng(0).integers(1, 256, (3, height, width), dtype=np.uint8)


@pytest.mark.parametrize(("size", "padding"), [(6, 2), ((4, 8), 0), ((10, 12), 2), ((3, 1), 1), ((9, 11), 3)])
def test_random_crop_covers_all_positions_of_the_padded_image(size, padding):
    height, width = (size, size) if isinstance(size, int) else size
    padded = np.pad(image(), ((0, 0), (padding, padding), (padding, padding)))
    possible = {
        padded[:, y : y + height, x : x + width].tobytes()
        for y in range(padded.shape[1] - height + 1)
        for x in range(padded.shape[2] - width + 1)
    }
    rng = np.random.default_rng(1)
    crops = [RandomCrop(size, padding)(image(), rng) for _ in range(40 * len(possible))]
    assert {crop.shape for crop in crops} == {(3, height, width)}
    assert {crop.tobytes() for crop in crops} == possible


def test_flip_mirrors_horizontally_with_the_given_probability():
    rng = np.random.default_rng(0)
    mirrored = image()[:, :, ::-1]
    flips = [np.array_equal(RandomHorizontalFlip(0.25)(image(), rng), mirrored) for _ in range(400)]
    assert 60 < sum(flips) < 140
    assert np.array_equal(RandomHorizontalFlip(0)(image(), rng), image())
    assert np.array_equal(RandomHorizontalFlip(1)(image(), rng), mirrored)
    with pytest.raises(ConfigError, match="p: must be a float between 0 and 1"):
        RandomHorizontalFlip(1.5)


def test_parameters_normalize_as_in_torchvision():
    pixel_transforms, params = read_transforms(
        [{"type": "RandomCrop", "size": 6}, ToTensor(), {"type": "Normalize", "mean": MEAN, "std": STD}]
    )
    assert [type(transform) for transform in pixel_transforms] == [RandomCrop]
    pixels = torch.from_numpy(image())[None]
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    expected = (pixels.double() / 255 - mean) / std
    torch.testing.assert_close(transform_images(pixels, params[None]).double(), expected, rtol=0, atol=1e-5)
    _, only_scaled = read_transforms([ToTensor()])
    torch.testing.assert_close(transform_images(pixels, only_scaled[None]).double(), pixels.double() / 255)
