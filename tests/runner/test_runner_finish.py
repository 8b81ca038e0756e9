"""Test that color transforms and normalization give the same training results on the device as on the host."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from slipstream.dataset import SegmentationDataset, apply_device_transforms, default_palette
from slipstream.model import Segmentor
from tiny_runs import Scripted, run, weights

TRANSFORMS = [
    dict(type="SegColorJitter", brightness=0.5, contrast=0.5, saturation=0.5),
    dict(type="SegRandomFlip", prob=0.5),
    dict(type="SegRandomRescale", scales=(0.5, 1.5)),
    dict(type="SegPadShortToCropSize", crop_size=(16, 12), fill_mask=2),
    dict(type="SegCropImageAndMask", crop_size=(16, 12), mode="random"),
    dict(type="SegStandardize", max_value=255),
    dict(type="SegNormalize", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
    dict(type="SegConvertToTensor"),
]


class Squares(SegmentationDataset):
    def __init__(self, transforms=()):
        super().__init__(transforms)
        self.metainfo = dict(classes=("dark", "bright"), palette=default_palette(2), ignore_index=2)

    def __len__(self):
        return 8

    def load(self, index):
        image = np.random.default_rng(index).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        return image, (image[..., 0] > 127).astype(np.uint8)


class Finished(Dataset):
    """A dataset that applies all transforms of another dataset on the host."""

    def __init__(self, dataset):
        self.dataset, self.metainfo = dataset, dataset.metainfo

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        one = {key: value[None] for key, value in self.dataset[index].items()}
        return {key: value[0] for key, value in apply_device_transforms(one).items()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, images):
        return self.body(images)


def train(folder, dataset, **options):
    loader = dict(dataset=dataset, batch_size=4, sampler=dict(type="DefaultSampler", shuffle=True))
    val = dict(loader, sampler=dict(type="DefaultSampler", shuffle=False))
    options = {"model": Segmentor(Net(), nn.CrossEntropyLoss(ignore_index=2)), **options}
    validation = dict(val_dataloader=val, val_cfg=dict(), val_evaluator=Scripted([0.1, 0.2]))
    return run(folder, train_dataloader=loader, **validation, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return weights(train(tmp_path_factory.mktemp("finished"), Finished(Squares(TRANSFORMS))))


def test_device_transforms_match_host_transforms(tmp_path, finished):
    runner = train(tmp_path, Squares(TRANSFORMS), custom_hooks=[dict(type="SegVisualizationHook")])
    torch.testing.assert_close(weights(runner), finished)
    with Image.open(tmp_path / "predictions.png") as picture:
        assert np.asarray(picture).std() > 0
