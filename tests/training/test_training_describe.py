"""After training, a network stores the classes and the transforms of the validation data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream import Trainer
from slipstream.recipes import compose
from slipstream.zoo import models


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
