"""Tests of the preparation of images for prediction."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch

from slipstream.dataset.prediction import PreparedImage, prepare_image, validation_transforms
from slipstream.registry import TRANSFORMS


@pytest.mark.parametrize("size", [(7, 5), (16, 18), (40, 30), (13, 64)])
def test_a_pixel_of_the_image_has_the_class_at_its_center(size):
    ids = torch.arange(20 * 24).reshape(20, 24)
    found = PreparedImage({}, (3, 1, 21, 17), size).resize_to_image(ids)
    rows, columns = (
        [first + floor(Fraction(2 * i + 1, 2 * length) * source) for i in range(length)]
        for first, source, length in ((1, 16, size[0]), (3, 18, size[1]))
    )
    assert found.tolist() == [[24 * row + column for column in columns] for row in rows]


def test_padding_is_outside_the_images_box():
    pad = TRANSFORMS.build(dict(type="SegPadShortToCropSize", crop_size=[8, 8], fill_image=0, fill_mask=255))
    prepared = prepare_image(np.full((4, 6, 3), 9, np.uint8), [pad])
    left, top, right, bottom = prepared.box
    assert prepared.sample["inputs"].shape == (3, 8, 8)
    assert (right - left, bottom - top) == (6, 4)
    assert (prepared.sample["inputs"][:, top:bottom, left:right] == 9).all()
    assert prepared.sample["inputs"].sum() == 9 * 4 * 6 * 3


def test_crops_are_left_out_so_that_the_whole_image_is_predicted():
    image = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    crop = TRANSFORMS.build(dict(type="SegCropImageAndMask", crop_size=4, mode="center"))
    prepared = prepare_image(image, [crop])
    found = prepared.resize_to_image(prepared.sample["inputs"][0])
    assert found.tolist() == image[..., 0].tolist()


def test_a_wrapper_dataset_has_the_transforms_of_its_inner_datasets():
    inner = dict(type="Inner", transforms=[dict(type="SegRescale")])
    for dataset in (inner, dict(dataset=inner), dict(datasets=[dict(dataset=inner), {}])):
        assert validation_transforms(dict(val_dataloader=dict(dataset=dataset))) == inner["transforms"]
    for cfg in ({}, dict(val_dataloader=None), dict(val_dataloader=dict(dataset=dict(type="Inner")))):
        assert validation_transforms(cfg) is None
