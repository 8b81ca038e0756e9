"""Tests of the loaders for SuperGradients' scripts: batches are pairs, and torchvision's transforms are accepted."""

import pytest
import torch

from slipstream import Trainer
from slipstream.dataset import apply_device_transforms
from slipstream.training import dataloaders as plain_dataloaders
from slipstream.training.super_gradients import loaders as dataloaders

pytest.importorskip("omegaconf")
SMALL = {"size": [32, 64], "length": 6}


def test_batches_are_pairs_of_transformed_images_and_class_ids():
    loader = dataloaders.get("street_scenes_val", SMALL, {"batch_size": 3})
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    images, masks = batches[0]
    raw = next(iter(plain_dataloaders.get("street_scenes_val", SMALL, {"batch_size": 3})))
    assert torch.equal(images, apply_device_transforms(raw)["inputs"])
    assert masks.dtype == torch.int64
    assert torch.equal(masks, raw["targets"].long())


def test_training_reads_the_same_samples_from_both_kinds_of_loaders(tmp_path):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 19, 1)
            torch.nn.init.constant_(self.layer.weight, 0.1)
            torch.nn.init.zeros_(self.layer.bias)

        def forward(self, images):
            return self.layer(images)

    weights = []
    for module in (dataloaders, plain_dataloaders):
        model, loader = Mean(), module.get("street_scenes_train", SMALL, {"batch_size": 3})
        params = {
            "max_epochs": 1,
            "initial_lr": 0.1,
            "optimizer": "SGD",
            "loss": "CrossEntropyLoss",
            "criterion_params": {"ignore_index": 255},
            "save_model": False,
        }
        Trainer(module.__name__, tmp_path).train(model, params, loader)
        weights.append(model.layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_torchvision_transforms_without_an_equivalent_are_used_as_they_are():
    kind = type("RandomCrop", (), {"__module__": "torchvision.transforms.transforms"})
    crop, same = kind(), kind()
    vars(crop).update({"size": (32, 32), "padding": 4, "padding_mode": "reflect"})
    vars(same).update({"size": (32, 32), "padding": 4})
    equal = [dict(type="RandomCrop", size=(32, 32), padding=4)]
    for transforms, expected in (([crop, same], [crop, same]), ([same], equal)):
        cfg = plain_dataloaders.config("cifar10_train", {"transforms": transforms}, {"batch_size": 2})
        assert cfg["dataset"]["transforms"] == expected
