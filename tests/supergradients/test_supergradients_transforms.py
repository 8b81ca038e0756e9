"""Tests of SuperGradients' transforms, called with only a sample and in Slipstream's datasets."""

import pickle
import random

import numpy as np
import pytest
import torch

from slipstream import dataset
from slipstream.dataset.transforms.pipeline import apply_transforms
from slipstream.training.super_gradients import transforms

Image = pytest.importorskip("PIL.Image")

ARGUMENTS = {
    "SegColorJitter": {"brightness": 0.5, "contrast": 0.5},
    "SegConvertToTensor": {},
    "SegCropImageAndMask": {"crop_size": (16, 8), "mode": "random"},
    "SegNormalize": {"mean": [0.5] * 3, "std": [0.25] * 3},
    "SegPadShortToCropSize": {"crop_size": 40, "fill_mask": 3},
    "SegPadToDivisible": {"divisible_value": 32},
    "SegRandomFlip": {"prob": 1.0},
    "SegRandomGaussianBlur": {"prob": 1.0},
    "SegRandomRescale": {"scales": (0.5, 2.0)},
    "SegRandomRotate": {"min_deg": 10, "max_deg": 20},
    "SegRescale": {"scale_factor": 0.5},
    "SegResize": {"h": 8, "w": 9},
    "SegStandardize": {},
}


def sample():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(256, size=(20, 30, 3), dtype=np.uint8),
        "mask": rng.integers(3, size=(20, 30), dtype=np.uint8),
    }


@pytest.mark.parametrize(
    "name", [name for name in dataset.__all__ if name.startswith("Seg") and name[3].isupper()]
)
def test_a_transform_accepts_a_sample_of_pillow_images(name):
    transform = pickle.loads(pickle.dumps(getattr(transforms, name)(**ARGUMENTS[name])))
    random.seed(3)
    found = transform({key: Image.fromarray(value) for key, value in sample().items()} | {"name": "a"})
    assert found.pop("name") == "a"
    random.seed(3)
    rng = np.random.default_rng(random.getrandbits(64))
    expected = getattr(dataset, name)(**ARGUMENTS[name])(sample(), rng)
    if name == "SegConvertToTensor":
        assert torch.equal(found["image"], torch.from_numpy(expected["image"]).permute(2, 0, 1).float())
        assert torch.equal(found["mask"], torch.from_numpy(expected["mask"]))
        return
    for key, value in expected.items():
        assert isinstance(found[key], Image.Image) == (value.dtype == np.uint8)
        assert np.array_equal(np.asarray(found[key]), value)


def test_transforms_called_in_sequence_return_the_same_tensors_as_in_a_dataset():
    names = ["SegResize", "SegPadToDivisible", "SegStandardize", "SegNormalize", "SegConvertToTensor"]
    steps = [getattr(transforms, name)(**ARGUMENTS[name]) for name in names]
    composed = apply_transforms(steps, sample(), np.random.default_rng(0))
    found = {key: Image.fromarray(value) for key, value in sample().items()}
    for step in steps:
        found = step(found)
    assert torch.equal(found["mask"], composed["targets"])
    scale, shift = composed["device_params"].view(2, 3, 1, 1)
    torch.testing.assert_close(found["image"], composed["inputs"] * scale + shift, atol=0.02, rtol=0)
