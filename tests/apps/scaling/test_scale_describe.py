"""Tests of `describe`, which determines the blocks of a network and their costs, against manual counts."""

import pytest
import torch
from torch import nn

from slipstream.apps.scaling import describe
from slipstream.apps.zoo import pp_lite_b_seg, pp_lite_t_seg, resnet18
from slipstream.errors import ModelError


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                         nn.Conv2d(8, 4, 1))  # fmt: skip


def test_blocks_are_modules_with_parameters_in_execution_order():
    model = describe(small(), (3, 10, 12), "small")
    assert model.name == "small"
    assert [(b.name, b.parameters, b.norm_channels) for b in model.blocks] == [
        ("0", 216, 0),
        ("1", 16, 8),
        ("3", 36, 0),
    ]


def test_multiply_add_counts_as_two_flops():
    model = describe(small(), (3, 10, 12))
    assert [b.flops for b in model.blocks] == [2 * 120 * 3 * 9 * 8, 0, 2 * 120 * 8 * 4]


def test_activations_are_storages_saved_by_autograd():
    # The image, the first convolution's output (for BatchNorm's backward) and ReLU's in-place result, which counts once
    # although both ReLU and the next convolution save it. The tolerance covers the mean and the inverse standard
    # deviation that BatchNorm saves for each channel.
    model = describe(small(), (3, 10, 12))
    assert model.activations == pytest.approx(120 * (3 + 8 + 8), rel=0.01)


@pytest.mark.parametrize(
    ("build", "parameters"), [(pp_lite_t_seg, 8_197_056), (pp_lite_b_seg, 12_412_704), (resnet18, 11_689_512)]
)
def test_all_parameters_of_zoo_networks_are_counted(build, parameters):
    with torch.device("meta"):
        network = build(num_classes=1000 if build is resnet18 else 19)
    assert describe(network, (3, 128, 256)).parameters == parameters


def test_network_is_not_modified():
    network = small().eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    describe(network, (3, 8, 8))
    assert not network.training
    assert not network[0]._forward_pre_hooks
    for name, value in network.state_dict().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, before[name])


def test_shared_weights_count_once_and_frozen_weights_do_not_count():
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    network[1].weight = network[0].weight
    network[2].requires_grad_(False)
    assert describe(network, (6,)).parameters == 36 + 6 + 6


def test_invalid_input_shape_raises_error():
    with pytest.raises(ModelError, match="Sequential does not accept an input of shape 4 x 8 x 8"):
        describe(small(), (4, 8, 8))


def test_network_without_parameters_raises_error():
    with pytest.raises(ModelError, match="ReLU has no trainable parameters"):
        describe(nn.ReLU(), (3,))
