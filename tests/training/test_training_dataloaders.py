from __future__ import annotations

import pytest
from torch.utils.data import RandomSampler

from slipstream.dataset import build_dataloader
from slipstream.training import dataloaders
from slipstream.zoo.street_scenes.folder import write_street_folder

OmegaConf = pytest.importorskip("omegaconf").OmegaConf

CROP = [
    {"SegRandomFlip": {"prob": 0.5}},
    {"SegPadShortToCropSize": {"crop_size": [32, 32], "fill_mask": 19}},
    {"SegCropImageAndMask": {"crop_size": [32, 32], "mode": "random"}},
]


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    root = tmp_path_factory.mktemp("street")
    write_street_folder(root, train=5, val=2, size=(32, 64))
    return str(root)


def test_name_selects_dataset_and_defaults():
    found = dataloaders.config("cityscapes_stdc_seg75_train", {"root_dir": "some/where"})
    assert found["dataset"]["type"] == "CityscapesDataset"
    assert found["dataset"]["root_dir"] == "some/where"
    assert found["dataset"]["split"] == "train"
    kinds = [transform["type"] for transform in found["dataset"]["transforms"]]
    assert kinds[:3] == ["SegColorJitter", "SegRandomFlip", "SegRandomRescale"]
    assert found["dataset"]["transforms"][2]["scales"] == [0.125, 1.5]
    assert found["sampler"] == {"type": "DefaultSampler", "shuffle": True}
    assert (found["batch_size"], found["drop_last"]) == (4, True)


@pytest.mark.parametrize(
    "entry",
    [
        "SegRandomFlip",
        {"SegRandomFlip": {}},
        {"SegRandomFlip": None},
        {"_target_": "super_gradients.training.transforms.transforms.SegRandomFlip"},
        {"type": "SegRandomFlip"},
    ],
)
def test_transforms_are_read_in_every_supported_form(entry):
    found = dataloaders.config("street_scenes_train", {"transforms": [entry]})
    assert found["dataset"]["transforms"] == [{"type": "SegRandomFlip"}]


def test_loader_reads_batches_from_the_original_folder_layout(street):
    loader = dataloaders.cityscapes_train(
        dataset_params={"root_dir": street, "transforms": CROP},
        dataloader_params={"batch_size": 2, "num_workers": 0},
    )
    assert type(loader.sampler) is RandomSampler
    assert len(loader) == 2
    batch = next(iter(loader))
    assert batch["inputs"].shape == (2, 3, 32, 32)
    assert batch["targets"].shape == (2, 32, 32)


def test_runner_builds_the_configuration(street):
    cfg = dataloaders.config("cityscapes_val", {"root_dir": street}, {"batch_size": 2, "num_workers": 0})
    loader = build_dataloader(cfg, seed=0, name="val_dataloader", training=False)
    (batch,) = loader
    assert batch["inputs"].shape == (2, 3, 32, 64)
    assert batch["device_params"].shape[0] == 2


def test_padding_without_fill_mask_has_class_0_and_logs_a_warning(capsys):
    for arguments, fill in (({}, 0), ({"fill_mask": 19}, 19)):
        transforms = [{"SegPadShortToCropSize": {"crop_size": 8, **arguments}}]
        found = dataloaders.config("coco_segmentation_train", {"transforms": transforms})["dataset"]
        assert found["transforms"] == [{"type": "SegPadShortToCropSize", "crop_size": 8, "fill_mask": fill}]
        captured = capsys.readouterr()
        assert ("the padding has class 0" in captured.out + captured.err) is (fill == 0)
