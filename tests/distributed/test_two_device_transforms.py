"""Test that training with device transforms in two processes, each with half of the batch, matches one process."""

import numpy as np
import pytest
import torch
from torch import nn
from two_processes import run_in_two
from two_trainings import train

from slipstream.dataset import SegmentationDataset, default_palette
from slipstream.model import Segmentor

TRANSFORMS = [
    dict(type="SegColorJitter", brightness=0.5, contrast=0.5, saturation=0.5),
    dict(type="SegRandomRescale", scales=(0.5, 1.5)),
    dict(type="SegPadShortToCropSize", crop_size=(12, 12), fill_mask=1),
    dict(type="SegCropImageAndMask", crop_size=(12, 12), mode="random"),
    dict(type="SegStandardize"),
    dict(type="SegNormalize", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
]


class Squares(SegmentationDataset):
    def __init__(self):
        super().__init__(TRANSFORMS)
        self.metainfo = dict(classes=("dark", "bright"), palette=default_palette(2), ignore_index=None)

    def __len__(self):
        return 16

    def load(self, index):
        image = np.random.default_rng(index).integers(0, 256, (20, 16, 3), dtype=np.uint8)
        return image, (image[..., 0] > 127).astype(np.uint8)


def trained(folder, world):
    torch.manual_seed(0)
    model = Segmentor(nn.Conv2d(3, 2, 3, padding=1))
    runner = train(folder, world, model, Squares())
    return {name: value.clone() for name, value in runner.model.state_dict().items()}


def two(folder):
    return trained(folder, 2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([two], tmp_path_factory.mktemp("finish"))["two"]


def test_two_ranks_have_the_weights_of_one_process(answers, tmp_path):
    own = trained(tmp_path, 1)
    for rank in answers:
        assert isinstance(rank, dict), rank
        found = {name.removeprefix("module."): value for name, value in rank.items()}
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)
