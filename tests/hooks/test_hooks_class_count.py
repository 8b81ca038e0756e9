"""Tests of ClassCountHook, which compares the class counts of the model and the datasets."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from slipstream.errors import ModelError
from slipstream.hooks.class_count import ClassCountHook
from slipstream.model import Segmentor
from slipstream.runner import Runner
from slipstream.zoo import BCEDiceLoss


class Scenes(Dataset):
    def __init__(self, classes):
        self.metainfo = dict(classes=tuple(classes), palette=[[0, 0, 0]] * len(classes), ignore_index=255)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        label = len(self.metainfo["classes"]) - 1
        return {
            "inputs": torch.zeros(3, 4, 4),
            "targets": torch.full((4, 4), min(label, 2), dtype=torch.uint8),
        }


def runner(folder, model=None, **sets):
    parts = {}
    for mode, classes in sets.items():
        parts[f"{mode}_dataloader"] = dict(batch_size=2, dataset=Scenes(classes))
    if "val" in sets:
        parts |= dict(val_cfg={}, val_evaluator=dict(type="IoUMetric"))
    if "train" in sets:
        parts |= dict(
            train_cfg=dict(by_epoch=True, max_epochs=1),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        )
    return Runner(model=model or Segmentor(nn.Conv2d(3, 3, 1)), work_dir=folder, **parts)


def test_model_with_a_matching_class_count_trains(tmp_path):
    runner(tmp_path, train="abc", val="abc").train()


def test_wrong_class_count_is_reported_before_the_first_batch(tmp_path):
    with pytest.raises(ModelError, match="3 classes, but the dataset has 5; set the network's num_classes"):
        runner(tmp_path, train="abcde").train()


def test_wrong_class_count_is_reported_in_validation(tmp_path):
    with pytest.raises(ModelError, match="3 classes, but the dataset has 2"):
        runner(tmp_path, val="ab").val()


def test_training_and_validation_data_must_have_the_same_class_count(tmp_path):
    with pytest.raises(ModelError, match=r"4 classes \(a, b, \.\.\.\), but the model has 3"):
        runner(tmp_path, train="abc", val="abcd").train()


def test_a_model_with_one_class_is_valid_for_a_dataset_with_two(tmp_path):
    for classes in ("ab", "abc"):
        run = runner(tmp_path, train=classes)
        run.model.num_classes = 1
        if classes == "ab":
            ClassCountHook().before_train(run)
            assert run.model.num_classes == 1
        else:
            with pytest.raises(ModelError, match=r"the dataset has 3 classes .* but the model has 1"):
                ClassCountHook().before_train(run)


def test_a_network_with_one_output_channel_trains_on_a_dataset_with_two_classes(tmp_path):
    runner(tmp_path, Segmentor(nn.Conv2d(3, 1, 1), BCEDiceLoss()), train="ab", val="ab").train()
    with pytest.raises(ModelError, match="1 classes, but the dataset has 3"):
        runner(tmp_path / "three", Segmentor(nn.Conv2d(3, 1, 1)), train="abc").train()
