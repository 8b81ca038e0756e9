"""Weight initialization, batches of images and losses have MMEngine's semantics."""

import math

import pytest
import torch
from mmengine.model import (
    BaseDataPreprocessor,
    BaseModel,
    BaseModule,
    BaseTTAModel,
    ImgDataPreprocessor,
    Sequential,
    stack_batch,
)
from mmengine.model import weight_init as init
from mmengine.structures import BaseDataElement, LabelData
from torch import nn

from slipstream.errors import DataError


def test_init_functions_use_the_formulas_of_their_papers():
    torch.manual_seed(0)
    layer = nn.Linear(400, 300)
    init.xavier_init(layer, gain=2, bias=0.5)
    assert layer.weight.std().item() == pytest.approx(2 * math.sqrt(2 / 700), rel=0.01)
    assert layer.bias.unique().tolist() == [0.5]
    init.kaiming_init(layer)
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 300), rel=0.01)
    init.caffe2_xavier_init(layer)
    assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(3 / 400), rel=0.01)
    init.trunc_normal_init(layer, std=1, a=-0.5, b=0.5)
    assert layer.weight.abs().max() <= 0.5
    init.uniform_init(layer, 2, 3)
    assert (layer.weight.min() >= 2, layer.weight.max() <= 3) == (True, True)
    init.normal_init(layer, mean=5, std=0.1)
    assert layer.weight.mean().item() == pytest.approx(5, abs=0.01)


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


def test_init_functions_skip_missing_weights_and_biases():
    init.constant_init(nn.ReLU(), 1)
    layer = nn.Linear(2, 2, bias=False)
    init.constant_init(layer, 3, bias=1)
    assert layer.weight.unique().tolist() == [3]


def test_the_bias_matches_the_given_probability():
    assert torch.tensor(init.bias_init_with_prob(0.01)).sigmoid().item() == pytest.approx(0.01)


def test_stacked_images_are_padded_at_the_end():
    batch = stack_batch([torch.ones(3, 4, 6), torch.ones(3, 5, 3)], pad_size_divisor=4, pad_value=7)
    assert batch.shape == (2, 3, 8, 8)
    assert batch[0, 0].eq(1).sum() == 24
    assert batch[1, :, :5, :3].eq(1).all()
    assert batch[1, :, 5:].eq(7).all()


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
    with pytest.raises(DataError, match="inputs"):
        preprocess({"inputs": 3})


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (dict(mean=[1, 2, 3], std=[1, 1, 1]), (1, 4, 4)),
        (dict(mean=[1, 2, 3], std=[1, 1, 1]), (4, 4, 4)),
        (dict(bgr_to_rgb=True), (1, 4, 4)),
        (dict(rgb_to_bgr=True), (2, 4, 4)),
    ],
)
def test_images_with_a_wrong_number_of_channels_raise_an_error(options, shape):
    with pytest.raises(DataError, match=str(shape[0])):
        ImgDataPreprocessor(**options)({"inputs": [torch.zeros(shape)]})


def test_the_alpha_channel_is_dropped_when_channels_are_reversed():
    image = torch.tensor([3.0, 2.0, 1.0, 9.0]).view(4, 1, 1)
    for inputs in ([image], image[None]):
        result = ImgDataPreprocessor([1, 1, 1], [1, 1, 1], bgr_to_rgb=True)({"inputs": inputs})["inputs"]
        assert result.flatten().tolist() == [0.0, 1.0, 2.0]


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


class Doubler(BaseModel):
    def forward(self, inputs, mode):
        return [value * 2 for value in inputs]


class Mean(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [sum(values) / len(values) for values in data_samples_list]


def test_predictions_for_augmented_images_are_merged_per_sample():
    batch = {"inputs": [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 30.0])]}  # two versions of two samples
    assert [value.item() for value in Mean(Doubler()).test_step(batch)] == [4.0, 40.0]
