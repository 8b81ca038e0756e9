"""Tests of kornia's augmentations in the data preprocessor."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from slipstream.dataset import SegStandardize
from slipstream.errors import ConfigError, DataError
from slipstream.model import ImgDataPreprocessor
from slipstream.zoo.street_scenes import StreetScenes
from tiny_runs import run

kornia = pytest.importorskip("kornia.augmentation")
MEAN, STD = [100.0, 110.0, 120.0], [50.0, 55.0, 60.0]


def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 3, 8, 10), generator=generator, dtype=torch.uint8)
    return {"inputs": images, "targets": images[:, 0] % 3}


def preprocessor(*modules):
    return ImgDataPreprocessor(MEAN, STD, batch_augments=modules)


@pytest.mark.parametrize("kind", [dict, tuple])
def test_images_and_masks_are_moved_together_in_training_only(kind):
    data, plain = batch(), ImgDataPreprocessor(MEAN, STD)
    given = data if kind is dict else tuple(data.values())
    flip = preprocessor(kornia.RandomHorizontalFlip(p=1.0))
    images, masks = flip(given, True).values() if kind is dict else flip(given, True)
    torch.testing.assert_close(images, plain(data)["inputs"].flip(-1))
    assert torch.equal(masks, data["targets"].flip(-1))
    same = flip(given, False)
    torch.testing.assert_close(
        same["inputs"] if kind is dict else same[0], plain(data)["inputs"], rtol=0, atol=0
    )


def test_pixels_outside_of_the_image_are_ignored():
    shift = preprocessor(kornia.RandomTranslate(translate_x=(0.5, 0.5), p=1.0))
    data = batch()
    moved = shift(data, True)["targets"]
    empty = (moved == 255).sum()
    assert empty == 2 * 8 * 5
    assert sorted(moved[moved != 255].unique().tolist()) == [0, 1, 2]


def test_class_ids_and_batches_without_targets_are_unchanged():
    labels = {"inputs": batch()["inputs"], "targets": torch.tensor([1, 2])}
    flip = preprocessor(kornia.RandomHorizontalFlip(p=1.0))
    assert torch.equal(flip(labels, True)["targets"], labels["targets"])
    assert flip({"inputs": labels["inputs"]}, True).keys() == {"inputs"}


def test_normalized_images_and_modules_in_a_dataset_are_refused():
    data = {**batch(), "device_params": torch.ones(2, 6)}
    with pytest.raises(ConfigError, match="already normalize"):
        preprocessor(kornia.RandomHorizontalFlip())(data, True)
    with pytest.raises(DataError, match="uint8 images"):  # their range is unknown
        preprocessor(kornia.RandomHorizontalFlip())({"inputs": torch.rand(2, 3, 8, 8)}, True)
    with pytest.raises(ConfigError, match=r"batch_augments=\[\.\.\.\]"):
        StreetScenes(size=(32, 64), length=1, transforms=[kornia.RandomHorizontalFlip(), SegStandardize()])[0]


def test_a_resumed_run_draws_the_same_augmentation(tmp_path):
    images = torch.randint(256, (6, 3, 8, 10), generator=torch.Generator().manual_seed(0)).byte()
    data = dict(dataset=TensorDataset(images, images[:, 0].long() % 3), batch_size=2)

    def train(folder, epochs, **options):
        torch.manual_seed(0)
        modules = kornia.RandomRotation(30.0, p=0.5), kornia.ColorJiggle(0.2, 0.2, p=0.5)
        trained = run(
            tmp_path / folder, model=nn.Conv2d(3, 3, 1), loss_fn=nn.CrossEntropyLoss(ignore_index=255),
            data_preprocessor=preprocessor(*modules), train_dataloader=data,
            train_cfg=dict(by_epoch=True, max_epochs=epochs), **options,
        )  # fmt: skip
        return trained.model.weight

    whole = train("whole", 2)
    train("cut", 1)
    assert torch.equal(train("cut", 2, resume=True), whole)
