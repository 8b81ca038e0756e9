"""Initializers, batches of images and losses have MMEngine's semantics."""

import pytest
import torch
from mmengine.model import (
    BaseDataPreprocessor,
    BaseModel,
    BaseModule,
    ImgDataPreprocessor,
    Sequential,
)
from mmengine.model import weight_init as init
from mmengine.structures import BaseDataElement, LabelData
from torch import nn


def test_strides_of_data_elements_do_not_depend_on_the_transforms():
    image = torch.arange(24.0).view(1, 4, 6)
    flipped = torch.from_numpy(image.numpy()[..., ::-1].astype(float))
    other = image.transpose(1, 2)[None].transpose(0, 1)
    for tensor in (
        image,
        flipped,
        other,
        torch.zeros(0, 4),
        torch.tensor(3),
        image.as_strided((1, 4), (1, 6)),
    ):
        inner = LabelData(label=tensor)
        batch = {
            "inputs": image,
            "data_samples": [BaseDataElement(metainfo={"name": "a"}, gt=inner, score=2)],
        }
        found = BaseDataPreprocessor().cast_data(batch)["data_samples"][0]
        assert torch.equal(found.gt.label, tensor)
        assert found.gt.label.stride() == torch.empty(tensor.shape).stride()
        assert (found.name, found.score) == ("a", 2)


def test_the_preprocessor_normalizes_before_it_pads():
    preprocess = ImgDataPreprocessor([10.0, 20.0, 30.0], [2.0, 4.0, 5.0], 4, pad_value=9, bgr_to_rgb=True)
    image = torch.tensor([30, 24, 12], dtype=torch.uint8).view(3, 1, 1)
    result = preprocess({"inputs": [image], "data_samples": ["sample"]})
    assert result["inputs"].shape == (1, 3, 4, 4)
    assert result["inputs"][0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]
    assert result["inputs"][0, :, 1:].eq(9).all()
    assert result["data_samples"] == ["sample"]
    stacked = preprocess({"inputs": image[None]})
    assert torch.equal(stacked["inputs"], result["inputs"])
    assert stacked["data_samples"] is None


@pytest.mark.parametrize("kind", ["Constant", init.ConstantInit])
def test_an_initializer_without_a_layer_has_no_effect(kind):
    class Net(BaseModule):
        def __init__(self, **options):
            super().__init__(dict(type=kind, val=0, **options))
            self.one, self.other = nn.Linear(2, 2), Sequential(nn.Linear(2, 2))

    def zeros(**options):
        net = Net(**options)
        net.init_weights()
        return [not net.one.weight.any(), not net.other[0].weight.any()]

    assert zeros() == [False, False]
    assert zeros(layer="Linear") == [True, True]
    assert zeros(override=dict(name="other")) == [False, True]
    list_of_modules = Sequential(nn.Linear(2, 2), init_cfg=dict(type=kind, val=0))
    list_of_modules.init_weights()
    assert list_of_modules[0].weight.any()
    assert isinstance(BaseModel(init_cfg=dict(type=kind, val=0)), BaseModule)


def test_losses_of_any_shape_are_averaged_before_they_are_summed():
    losses = {"loss_a": torch.tensor([1.0, 3.0]), "loss_b": [torch.tensor([2.0, 4.0]), torch.tensor(5.0)]}
    total, logs = BaseModel().parse_losses({**losses, "acc": torch.tensor([10.0, 20.0])})
    assert total.item() == 2 + 3 + 5
    assert {name: value.item() for name, value in logs.items()} == {
        "loss": 10.0,
        "loss_a": 2.0,
        "loss_b": 8.0,
        "acc": 15.0,
    }
