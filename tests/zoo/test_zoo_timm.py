"""Tests of timm networks that are built by name. Most tests replace timm with a mock that defines the functions that
Slipstream calls."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import BuildError, CheckpointError, ConfigError
from slipstream.runner import Runner
from slipstream.zoo import models
from torchvision_operators import import_timm


class Tiny(nn.Module):
    """A network with the attributes that Slipstream reads from timm networks."""

    pretrained_cfg: ClassVar = {"classifier": "head.fc"}

    def __init__(self, num_classes, in_chans, drop_rate=0.0):
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Sequential()
        self.head.fc = nn.Linear(4, num_classes)
        self.drop_rate = drop_rate

    def reset_classifier(self, num_classes):
        self.head.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).mean((2, 3)))


@pytest.fixture
def timm(monkeypatch):
    module, calls = ModuleType("timm"), []

    def create_model(name, pretrained=False, **options):
        calls.append((name, pretrained))
        if pretrained and not module.online:
            raise RuntimeError("no route to host\nmore lines")
        network = Tiny(**options)
        if pretrained:
            nn.init.constant_(network.stem.weight, 0.25)
        return network

    module.online = False
    module.__version__, module.calls, module.create_model = "1.0", calls, create_model
    module.utils = SimpleNamespace(reparameterize_model=lambda model, inplace: model)
    module.list_models = lambda: ["tiny_net", "other_net"]
    module.is_model = lambda name: name in module.list_models()
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def test_a_name_with_the_prefix_builds_a_timm_network_with_random_weights(timm):
    network = models.get("timm:tiny_net", num_classes=3, arch_params={"drop_rate": 0.5, "in_channels": 4})
    assert network(torch.zeros(2, 4, 8, 8)).shape == (2, 3)
    assert network.model.drop_rate == 0.5
    assert timm.calls == [("tiny_net", False)]
    assert network.get_finetune_lr_dict(0.1) == {"model.head.fc": 0.1, "default": 0.0}
    with pytest.raises(ConfigError, match="num_classes: is required for 'timm:tiny_net'"):
        models.get("timm:tiny_net")
    with pytest.raises(BuildError, match="depth"):
        models.get("timm:tiny_net", 3, depth=2)


@pytest.mark.parametrize(
    "options", [{"pretrained_weights": "imagenet"}, {"arch_params": {"pretrained": True}}]
)
def test_weights_are_only_downloaded_on_request_and_an_offline_error_is_one_line(timm, options):
    with pytest.raises(CheckpointError, match="timm:tiny_net' cannot be loaded: no route to host") as error:
        models.get("timm:tiny_net", 3, **options)
    assert timm.calls == [("tiny_net", False), ("tiny_net", True)]
    assert "set checkpoint_path to the file" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["checkpoint_path", "checkpoint_paths", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"]
)
def test_options_that_set_the_source_of_the_weights_raise_an_error(timm, key):
    with pytest.raises(ConfigError, match="unchecked files") as error:
        models.get("timm:tiny_net", 3, arch_params={key: "w.pth"})
    assert key in str(error.value)
    assert timm.calls == []


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


def runner(folder, model, epochs, **arguments):
    return Runner(
        model=model,
        work_dir=str(folder),
        train_dataloader=dict(dataset=Images(), batch_size=2),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        **arguments,
    )


@pytest.mark.parametrize("plain", [False, True])
def test_a_run_downloads_the_weights_before_training_and_a_resumed_run_does_not(timm, tmp_path, plain):
    network = {"type": "TimmClassifier", "name": "tiny_net", "num_classes": 2, "pretrained": True}
    model = network if plain else {"type": "SupervisedModel", "network": network}
    loss = {"loss_fn": {"type": "CrossEntropyLoss"}} if plain else {}
    timm.online = True
    first = runner(tmp_path, model, 1, **loss)
    assert timm.calls == [("tiny_net", False)]  # the constructor downloads nothing
    trained = first.train()
    trained = trained if plain else trained.network
    assert timm.calls == [("tiny_net", False), ("tiny_net", True)]
    assert bool((trained.model.stem.weight == 0.25).all())
    timm.online = False
    again = runner(tmp_path, model, 2, resume=True, **loss)
    resumed = again.train()
    assert again.epoch == 2
    assert len(timm.calls) == 3
    resumed = resumed if plain else resumed.network
    assert torch.equal(resumed.model.stem.weight, trained.model.stem.weight)


@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_checkpoints_with_timm_parameter_names_are_loaded(timm, tmp_path, prefix):
    source = models.get("timm:tiny_net", 3)
    torch.save({prefix + key: value for key, value in source.model.state_dict().items()}, tmp_path / "w.pth")
    loaded = models.get("timm:tiny_net", 3, checkpoint_path=tmp_path / "w.pth")
    torch.testing.assert_close(loaded.state_dict(), source.state_dict(), rtol=0, atol=0)
    other = models.get("timm:tiny_net", 5, checkpoint_path=tmp_path / "w.pth", checkpoint_num_classes=3)
    assert torch.equal(other.model.stem.weight, source.model.stem.weight)


def test_zoo_methods_work_on_timm_networks(timm):
    network = models.get("timm:tiny_net", 3)
    network.model.norm.running_mean.fill_(0.5)
    x = torch.randn(2, 3, 8, 8)
    expected = network.eval()(x)
    network.prep_model_for_conversion([8, 8])
    torch.testing.assert_close(network(x), expected)
    network.set_dataset_processing_params(class_names=["a", "b", "c"])
    network.replace_head(5)
    assert network(x).shape == (2, 5)
    assert len(network.predict(np.zeros((8, 8, 3), np.uint8)).class_names) == 5
    network.set_processing_from_data(
        list("abcde"), [], None
    )  # the parameters of the old head do not take precedence
    assert network.predict(np.zeros((8, 8, 3), np.uint8)).class_names == tuple("abcde")


def test_networks_from_the_installed_timm_have_gradients_and_load_their_weights():
    timm = import_timm()
    network = models.get("timm:convnext_atto", num_classes=5)
    network(torch.randn(2, 3, 64, 64)).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    names = [name for name, _ in network.named_parameters()]
    for prefix in set(network.get_finetune_lr_dict(0.1)) - {"default"}:
        assert any(name.startswith(prefix) for name in names)
    own = timm.create_model("convnext_atto", num_classes=5).eval()
    network.eval().load_state_dict(own.state_dict())
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(network(x), own(x))
