"""Tests of the errors for unknown network names, which suggest similar names from Slipstream or timm."""

import sys
from types import ModuleType

import pytest

from slipstream.errors import ConfigError, SlipstreamError, UnknownNameError
from slipstream.training.super_gradients.scripts import Models
from slipstream.training.recipe import recipe_config
from slipstream.zoo import models

TIMM = ["mobilenetv3_small_050", "mobilenetv3_small_100", "vit_base_mci_224", "vit_base_patch16_224", "resnet101",
        "resnet18", "regnety_008", "densenet121", "convnext_tiny", "convnext_tiny_hnf"]  # fmt: skip


@pytest.fixture
def timm(monkeypatch):
    module = ModuleType("timm")
    module.list_models = lambda: TIMM
    monkeypatch.setitem(sys.modules, "timm", module)


@pytest.fixture
def no_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)


def message(name):
    with pytest.raises(UnknownNameError) as error:
        models.get(name, 10)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("vit_base", "vit_base_patch16_224"),
        ("mobilenet_v3_small", "mobilenetv3_small_100"),
        ("regnetY800", "regnety_008"),
        ("resnet101", "resnet101"),
        ("ConvNext_Tiny", "convnext_tiny"),
        ("densenet", "densenet121"),
    ],
)
def test_a_network_of_timm_is_suggested_if_timm_has_it(timm, name, suggested):
    assert f"no network is named '{name}'; did you mean 'timm:{suggested}'? (" in message(name)


@pytest.mark.parametrize("name", ["vit_base", "mobilenet_v3_small", "densenet121", "regnetY800", "unknown"])
def test_without_timm_the_error_states_where_classification_networks_come_from(no_timm, name):
    text = message(name)
    assert "did you mean" not in text
    assert "other classification networks come from timm, under the name timm:NAME" in text


def test_no_network_of_timm_is_suggested_if_timm_does_not_have_it(timm):
    assert "did you mean" not in message("swin_gigantic")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("ddrnet23", "ddrnet_23"), ("regseg4", "regseg48"), ("pplite", "pp_lite_b_seg"), ("stdc", "stdc1_seg"),
        ("unett", "unet"), ("resnet_18", "resnet18"), ("STDC1SEG", "stdc1_seg"),
    ],
)  # fmt: skip
def test_slipstreams_own_networks_are_suggested(no_timm, name, suggested):
    assert f"did you mean '{suggested}'?" in message(name)


def test_names_in_recipes_and_scripts_have_the_same_suggestions(timm):
    with pytest.raises(
        UnknownNameError, match=r"architecture: .*'timm:vit_base_patch16_224'.*register its class"
    ):
        recipe_config({"architecture": "vit_base", "experiment_name": "a"})
    with pytest.raises(SlipstreamError, match=r"Models\.VIT_BASE .*'timm:vit_base_patch16_224'"):
        Models.VIT_BASE  # noqa: B018


def test_weights_by_name_raise_an_error_with_the_remedies():
    remedies = r"'cityscapes'.*to a file or .*hf://ORG/REPO/FILE.*checkpoint_sha256.*checkpoint_num_classes"
    with pytest.raises(ConfigError, match="^pretrained_weights: .*" + remedies):
        models.get("pp_lite_t_seg75", 1, pretrained_weights="cityscapes")
    recipe = {
        "architecture": "pp_lite_t_seg75",
        "num_classes": 1,
        "experiment_name": "a",
        "checkpoint_params": {"pretrained_weights": "cityscapes"},
    }
    with pytest.raises(ConfigError, match=r"^checkpoint_params\.pretrained_weights: .*" + remedies):
        recipe_config(recipe)
