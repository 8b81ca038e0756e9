"""Tests of networks from segmentation_models_pytorch that are built by name."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from slipstream.errors import CheckpointError, ConfigError, ModelError, UnknownNameError
from slipstream.zoo import models
from tiny_runs import run
from torchvision_operators import import_torchvision


@pytest.fixture
def smp(monkeypatch):
    import_torchvision()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("segmentation_models_pytorch")


def get(**options):
    torch.manual_seed(0)
    return models.get("smp:unet", 3, encoder_name="resnet18", **options)


def test_a_network_by_name_is_that_of_the_library(smp, tmp_path):
    own = smp.Unet("resnet18", encoder_weights=None, classes=3)
    torch.save(own.state_dict(), tmp_path / "own.pth")
    network = get(checkpoint_path=tmp_path / "own.pth")
    assert network.task == "segmentation"
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(network.eval()(x), own.eval()(x), rtol=0, atol=0)
    backbone = models.get(
        "smp:fpn", 5, encoder_name="resnet18", checkpoint_path=tmp_path / "own.pth", load_backbone=True
    )
    torch.testing.assert_close(backbone.model.encoder.state_dict(), own.encoder.state_dict(), rtol=0, atol=0)
    network.replace_head(5)
    assert network(x).shape == (2, 5, 64, 64)
    assert network.predict(np.zeros((64, 64, 3), np.uint8)).prediction.segmentation_map.shape == (64, 64)


def test_it_trains_by_its_name_in_a_configuration(smp, tmp_path):
    data = TensorDataset(torch.randn(4, 3, 32, 32), torch.randint(3, (4, 32, 32)))
    model = dict(type="SmpSegmentor", name="fpn", num_classes=3, encoder_name="resnet18")
    trained = run(
        tmp_path,
        model=model,
        train_dataloader=dict(dataset=data, batch_size=2),
        loss_fn=dict(type="CrossEntropyLoss"),
    )
    assert trained.iter == 4
    assert not torch.equal(trained.model.model.encoder.conv1.weight, get().model.encoder.conv1.weight)


def test_errors_name_the_network(smp):
    with pytest.raises(UnknownNameError, match=r"no network named 'unett'; did you mean 'unet'\?"):
        models.get("smp:unett", 3)
    with pytest.raises(ConfigError, match="num_classes: is required for 'smp:unet'"):
        models.get("smp:unet")
    for options in (
        dict(pretrained=True),
        dict(encoder_weights="imagenet"),
        dict(pretrained_weights="imagenet"),
    ):
        with pytest.raises(CheckpointError, match="pretrained weights of 'smp:unet' cannot be loaded"):
            get(**options)
    with pytest.raises(ModelError, match="cannot be replaced"):
        models.get("smp:dpt", 3, encoder_name="tu-vit_tiny_patch16_224").replace_head(5)
