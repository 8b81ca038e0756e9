from __future__ import annotations

import logging

import pytest
import torch

from slipstream.errors import BuildError, CheckpointError, ModelError, UnknownNameError
from slipstream.zoo import models

PROMISED = [
    *(
        "pp_lite_t_seg",
        "pp_lite_t_seg50",
        "pp_lite_t_seg75",
        "pp_lite_b_seg",
        "pp_lite_b_seg50",
        "pp_lite_b_seg75",
    ),
    *("stdc1_seg", "stdc1_seg50", "stdc1_seg75", "stdc2_seg", "stdc2_seg50", "stdc2_seg75"),
    *("regseg48", "ddrnet_23", "ddrnet_23_slim", "ddrnet_39", "resnet18", "resnet34", "resnet50"),
    *("segformer_b0", "segformer_b1", "segformer_b2", "segformer_b3", "segformer_b4", "segformer_b5"),
]


@pytest.fixture
def trained(tmp_path):
    """A network and a function that writes a checkpoint of what is made of its weights."""
    network = models.get("ddrnet_23_slim", 5)
    for parameter in network.parameters():
        torch.nn.init.uniform_(parameter)

    def write(wrap):
        torch.save(wrap(network.state_dict()), tmp_path / "weights.pth")
        return tmp_path / "weights.pth"

    return network, write


def same(network, other):
    state = other.state_dict()
    return {key: torch.equal(value, state[key]) for key, value in network.state_dict().items()}


def test_every_promised_name_is_known():
    assert models.names() == sorted(PROMISED)


@pytest.mark.parametrize("name", PROMISED)
def test_every_name_builds_a_network_for_so_many_classes(name):
    with torch.device("meta"):
        network = models.get(name, num_classes=7).eval()
        assert network(torch.empty(1, 3, 64, 64)).shape == ((1, 7) if "resnet" in name else (1, 7, 64, 64))


def test_options_reach_the_network():
    with torch.device("meta"):
        network = models.get("pp_lite_t_seg75", 4, use_aux_heads=False)
    assert len(network.aux_heads) == 0


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="no network 'ddrnet23'; did you mean 'ddrnet_23'"):
        models.get("ddrnet23", 19)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(BuildError, match="use_aux_heads"):
        models.get("ddrnet_23_slim", 19, use_aux_head=False)


def test_fewer_than_one_class_is_refused():
    with pytest.raises(ModelError, match="num_classes"):
        models.get("segformer_b0", 0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "meta": {"epoch": 3}},
        lambda state: {
            "net": {key: torch.zeros_like(v) for key, v in state.items()},
            "ema_net": state,
            "epoch": 3,
        },
        lambda state: {"net": {f"module.{key}": value for key, value in state.items()}, "acc": 0.5},
    ],
    ids=["tensors", "MMEngine", "SuperGradients with an average", "SuperGradients under DDP"],
)
def test_weights_are_found_in_checkpoints_of_every_kind(trained, wrap):
    network, write = trained
    loaded = models.get("ddrnet_23_slim", 5, checkpoint_path=write(wrap))
    assert all(same(loaded, network).values())


def test_strict_loading_refuses_another_number_of_classes(trained):
    _, write = trained
    with pytest.raises(
        CheckpointError, match=r"final_layer\.conv2\.weight is \(5, 64, 1, 1\) there and \(7, 64"
    ):
        models.get("ddrnet_23_slim", 7, checkpoint_path=write(dict))


def test_loose_loading_skips_what_does_not_match_and_says_which(trained, caplog):
    network, write = trained
    path = write(lambda state: {**{k: v for k, v in state.items() if "spp" not in k}, "odd": torch.ones(1)})
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = models.get("ddrnet_23_slim", 5, checkpoint_path=path, strict_load=False)
    assert all(equal for key, equal in same(loaded, network).items() if "spp" not in key)
    assert f"{path} into ddrnet_23_slim: missing in it: spp." in caplog.text
    assert "unknown to the model: odd" in caplog.text


@pytest.mark.parametrize("prefix", ["backbone.", "module.backbone.", ""])
def test_a_backbone_is_loaded_without_its_classifier_which_is_named(tmp_path, caplog, prefix):
    source = models.get("pp_lite_t_seg", 5)
    backbone = {
        f"{prefix}{key}": torch.rand(v.shape) for key, v in source.encoder.backbone.state_dict().items()
    }
    path = tmp_path / "stdc1.pth"
    torch.save({"net": {**backbone, "linear.weight": torch.rand(10, 1024)}}, path)
    with caplog.at_level(logging.WARNING, "slipstream"):
        network = models.get("pp_lite_t_seg75", 5, checkpoint_path=path, load_backbone=True)
    for key, value in network.encoder.backbone.state_dict().items():
        assert torch.equal(value, backbone[prefix + key].to(value.dtype))
    assert "unknown to the model: linear.weight" in caplog.text


def test_a_file_of_another_network_is_refused_even_when_loose(trained):
    _, write = trained
    with pytest.raises(CheckpointError, match="has not one tensor of this model"):
        models.get("segformer_b0", 5, checkpoint_path=write(dict), strict_load=False)


def test_a_file_without_weights_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(CheckpointError, match=r"holds no weights: none of its keys \['epoch'\]"):
        models.get("resnet18", 10, checkpoint_path=tmp_path / "empty.pth")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        models.get("resnet18", 10, checkpoint_path=tmp_path / "none.pth")
