"""After training, a network stores the classes and the transforms of the validation data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from slipstream import Trainer
from slipstream.apps.street_scenes import StreetScenes
from slipstream.zoo import models
from slipstream.dataset import CIFAR10
from slipstream.recipes import compose
from slipstream.training.trainer import _store_processing as store_processing

CLASSIFY = [{"type": "ToTensor"}, {"type": "Normalize", "mean": [0.5] * 3, "std": [0.2] * 3}]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.random.default_rng(0).integers(256, size=(4, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder.parent


def test_a_checkpoint_from_a_recipe_predicts_like_the_trained_network(cifar, tmp_path):
    pytest.importorskip("hydra")
    overrides = [
        f"data_root_dir={cifar}", f"ckpt_root_dir={tmp_path}", "epochs=1", "num_workers=0", "batch_size=4",
        "val_batch_size=4", "training_hyperparams.max_train_batches=1",
    ]  # fmt: skip
    trained, _ = Trainer.train_from_config(compose("cifar10_resnet", overrides))
    loaded = models.get("resnet18_cifar", 10, checkpoint_path=tmp_path / "resnet18_cifar" / "ckpt_latest.pth")
    image = np.random.default_rng(1).integers(256, size=(32, 32, 3), dtype=np.uint8)
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])
    )
    x = (torch.from_numpy(image).permute(2, 0, 1) / 255 - mean) / std
    with torch.no_grad():
        expected = float(trained.cpu().eval()(x[None]).softmax(1).max())
    for network in (trained, loaded):
        found = network.predict(image)
        assert found.prediction.confidence == pytest.approx(expected, abs=1e-5)
        assert found.class_names[0] == "airplane"


def test_the_validation_data_is_found_inside_wrappers_and_does_not_replace_the_users_values(cifar):
    data = Subset(CIFAR10(cifar, transforms=CLASSIFY), [0])
    network = models.get("resnet18_cifar", 10)
    store_processing(network, data)
    image = np.zeros((32, 32, 3), np.uint8)
    assert network.predict(image).class_names[9] == "truck"
    mine = models.get("resnet18_cifar", 10)
    mine.set_dataset_processing_params(list("abcdefghij"), CLASSIFY)
    store_processing(mine, data)
    assert mine.predict(image).class_names[9] == "j"


def test_new_training_data_replaces_the_description_in_a_checkpoint(cifar):
    network = models.get("resnet18_cifar", 10)
    stored = "{model: {type: Any}, val_dataloader: {dataset: {transforms: [{type: ToTensor}]}}}"
    network.set_processing_from_checkpoint({"dataset_meta": {"classes": list("abcdefghij")}, "cfg": stored})
    image = np.zeros((32, 32, 3), np.uint8)
    assert network.predict(image).class_names[9] == "j"
    store_processing(network, CIFAR10(cifar, transforms=CLASSIFY))
    assert network.predict(image).class_names[9] == "truck"
    assert len(network._processing.transforms) == len(CLASSIFY)


def test_data_for_another_task_or_without_classes_is_ignored(cifar):
    scenes = StreetScenes(size=(32, 64), length=1, cache_in_memory=False)
    plain = TensorDataset(torch.zeros(1, 3, 8, 8), torch.zeros(1))
    for name, data in (("resnet18_cifar", scenes), ("regseg48", CIFAR10(cifar)), ("regseg48", plain)):
        network = models.get(name, 19)
        store_processing(network, data)
        assert not network.has_processing
    network = models.get("regseg48", 19)
    store_processing(network, scenes)
    assert network.has_processing
