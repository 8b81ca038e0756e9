"""Tests of networks from `models.get`: prediction, head replacement, and preparation for deployment."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from slipstream.errors import ModelError
from slipstream.zoo import models, predicting

Image = pytest.importorskip("PIL.Image")

# The backbone attribute of each network.
NETWORKS = {
    "pp_lite_t_seg": "encoder",
    "stdc1_seg": "cp",
    "regseg48": "backbone",
    "ddrnet_23_slim": "_backbone",
    "segformer_b0": "_backbone",
    "resnet18": "layer4",
    "resnet50": "layer4",
    "unet": "encoder",
    "shelfnet18_lw": "backbone",
}
WITH_HEADS = {name: {"use_aux_heads": True} for name in ("pp_lite_t_seg", "ddrnet_23_slim")}
CLASSIFY = [{"type": "ToTensor"}, {"type": "Normalize", "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}]
SEGMENT = [
    {"type": "SegRescale", "scale_factor": 0.5},
    {"type": "SegPadShortToCropSize", "crop_size": [64, 64], "fill_mask": 19},
    {"type": "SegStandardize", "max_value": 255},
]


def perturbed(network):
    """Randomize the BatchNorms. Return the network in evaluation mode."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return network.eval()


def picture(height=20, width=30, seed=0):
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", NETWORKS)
def test_preparation_removes_auxiliary_heads_and_keeps_the_outputs(name):
    torch.manual_seed(0)
    network = perturbed(models.get(name, 5, **WITH_HEADS.get(name, {}))).double()
    x = torch.randn(2, 3, 96, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = network(x)
        network.train().prep_model_for_conversion(input_size=[64, 96])
        assert not network.training
        torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)
    assert isinstance(network.train()(x), torch.Tensor)  # there are no auxiliary heads


@pytest.mark.parametrize(("name", "kept"), NETWORKS.items())
def test_replacing_the_head_changes_the_number_of_classes_and_keeps_the_backbone(name, kept):
    heads = WITH_HEADS.get(name, {})
    network = models.get(name, 5, **heads)
    part = network.get_submodule(kept)
    before = copy.deepcopy(part.state_dict())
    reference = models.get(name, 7, **heads)
    network.replace_head(new_num_classes=7)
    shapes = {key: value.shape for key, value in reference.state_dict().items()}
    assert {key: value.shape for key, value in network.state_dict().items()} == shapes
    torch.testing.assert_close(part.state_dict(), before, rtol=0, atol=0)
    network(torch.randn(2, 3, 64, 64))
    with pytest.raises(ModelError, match="num_classes must be at least 1"):
        network.replace_head(0)


def test_classification_returns_the_class_and_its_probability(tmp_path):
    network = perturbed(models.get("resnet18_cifar", 3))
    network.set_dataset_processing_params(["cat", "dog", "cow"], CLASSIFY)
    image = picture()
    x = (torch.from_numpy(image).permute(2, 0, 1) / 255 - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / (
        torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    )
    with torch.no_grad():
        probabilities = network(x[None]).softmax(1)[0]
    network.train()
    found = network.predict(image)
    assert network.training
    assert found.prediction.label == probabilities.argmax()
    assert found.prediction.confidence == pytest.approx(float(probabilities.max()), abs=1e-5)
    assert found.class_name == ["cat", "dog", "cow"][found.prediction.label]
    Image.fromarray(image).save(tmp_path / "image.png")
    inputs = [image, tmp_path / "image.png", str(tmp_path / "image.png"), Image.fromarray(image)]
    inputs += [torch.from_numpy(image).permute(2, 0, 1), picture(18, 22, seed=1)]
    several = network.predict(inputs, batch_size=2)
    assert [one.prediction.confidence for one in several[:5]] == pytest.approx(
        [found.prediction.confidence] * 5, abs=1e-5
    )
    assert several[5].prediction.image_shape == (18, 22)
    assert len(network.predict(tmp_path)) == 1


@pytest.mark.parametrize("channels", [1, 4])
def test_segmentation_returns_the_class_of_each_pixel(channels, tmp_path):
    network = perturbed(models.get("pp_lite_t_seg", channels))
    network.set_dataset_processing_params(["road"] if channels == 1 else list("abcd"), SEGMENT)
    image = np.repeat(np.repeat(picture(40, 50), 2, 0), 2, 1)  # halving it restores the small picture
    found = network.predict(image)
    padded = torch.zeros(1, 3, 64, 64)
    small = torch.from_numpy(picture(40, 50)).permute(2, 0, 1).float()
    top, left = 12, 7
    padded[0, :, top : top + 40, left : left + 50] = small
    with torch.no_grad():
        logits = network(padded / 255)[0]
    ids = (logits[0] > 0).long() if channels == 1 else logits.argmax(0)
    expected = ids[top : top + 40, left : left + 50].repeat_interleave(2, 0).repeat_interleave(2, 1)
    mask = found.prediction.segmentation_map
    assert mask.shape == found.prediction.image_shape == (80, 100)
    assert (mask == expected.numpy()).mean() > 0.99  # rounding may change the class of a pixel
    assert found.class_names == (("background", "road") if channels == 1 else tuple("abcd"))
    found.save(tmp_path / "one.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "one.png")), found.draw())
    network.predict([image]).save(tmp_path / "all")
    assert Image.open(tmp_path / "all/pred_0.jpg").size == (100, 80)


@pytest.mark.parametrize(("name", "unfused"), [("resnet18_cifar", 17), ("pp_lite_t_seg", 0)])
def test_fused_copy_predicts_the_same(name, unfused, monkeypatch):
    network = perturbed(models.get(name, 3)).double()
    state = copy.deepcopy(network.state_dict())
    used = []
    original = predicting._predictions
    monkeypatch.setattr(predicting, "_predictions", lambda *a: used.append(a[0]) or original(*a))
    network.train().predict(picture(64, 64), fuse_model=True)
    fused, x = used[0], torch.rand(2, 3, 64, 64, dtype=torch.float64)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in fused.modules()) == unfused
    with torch.no_grad():
        outputs, expected = predicting.main_output(fused.eval()(x)), predicting.main_output(network.eval()(x))
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(network.state_dict(), state, rtol=0, atol=0)


PREPROCESSOR = {"type": "ImgDataPreprocessor", "mean": [120.0, 110.0, 100.0], "std": [50.0, 60.0, 70.0]}


@pytest.mark.parametrize("of_runner", [False, True])
@pytest.mark.parametrize("name", ["regseg48", "resnet18_cifar"])
def test_predict_uses_the_normalization_of_the_data_preprocessor(tmp_path, name, of_runner, monkeypatch):
    network = models.get(name, 3).eval()
    cfg = {"model": {}, "val_dataloader": {"dataset": {"transforms": []}}}
    (cfg if of_runner else cfg["model"])["data_preprocessor"] = PREPROCESSOR
    meta = {"cfg": yaml.safe_dump(cfg), "dataset_meta": {"classes": ["a", "b", "c"]}}
    torch.save({"state_dict": network.state_dict(), "meta": meta}, tmp_path / "run.pth")
    image = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    mean, std = (torch.tensor(PREPROCESSOR[key]).view(3, 1, 1) for key in ("mean", "std"))
    logged, seen = [], []
    monkeypatch.setattr(predicting, "print_log", lambda *arguments: logged.append(arguments))
    loaded = models.get(name, 3, checkpoint_path=tmp_path / "run.pth")
    loaded.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    loaded.predict(image)
    torch.testing.assert_close(seen[0][0], (torch.from_numpy(image).permute(2, 0, 1) - mean) / std)
    assert not logged
