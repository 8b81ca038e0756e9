"""Tests of the configuration that a run saves in its work_dir."""

import sys

import pytest
import torch

from slipstream.cli.main import main
from slipstream.config import Config

MODULE = """
import torch
from slipstream.registry import DATASETS

@DATASETS.register_module(force=True)
class SavedConfigData(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"inputs": torch.full((4,), index / 16), "targets": torch.tensor(index % 3)}
"""
CONFIG = """
custom_imports = dict(imports=["saved_config_data"], path="{{ fileDirname }}")
model = dict(type="Classifier", network=dict(type="Linear", in_features=4, out_features=3))
train_dataloader = dict(
    batch_size=4, dataset=dict(type="SavedConfigData"), sampler=dict(type="DefaultSampler", shuffle=True)
)
val_dataloader = dict(batch_size=4, dataset=dict(type="SavedConfigData"))
val_cfg = dict()
val_evaluator = "loss"
train_cfg = dict(by_epoch=True, max_epochs=2)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
log_level = "ERROR"
"""


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "saved_config_data.py").write_text(MODULE)
    (tmp_path / "tiny.py").write_text(CONFIG)


def weights(folder):
    return torch.load(folder / "epoch_2.pth", weights_only=True)["state_dict"]


@pytest.mark.parametrize("randomness", ["", "randomness = None\n", "randomness = dict(seed=None)\n"])
def test_saved_configuration_repeats_a_run_without_a_seed(tmp_path, randomness):
    (tmp_path / "tiny.py").write_text(CONFIG + randomness)
    assert main(["train", "tiny.py"]) == 0
    saved = tmp_path / "work_dirs/tiny/tiny.py"
    assert isinstance(Config.fromfile(saved).randomness.seed, int)
    before = saved.read_bytes()
    assert main(["val", "tiny.py"]) == 0
    assert saved.read_bytes() == before
    assert main(["train", str(saved), "--work-dir", "again"]) == 0
    torch.testing.assert_close(weights(tmp_path / "again"), weights(saved.parent), rtol=0, atol=0)


def test_configuration_of_a_resumed_run_starts_a_new_run(tmp_path):
    assert main(["train", "tiny.py", "train_cfg.max_epochs=1"]) == 0
    assert main(["train", "tiny.py", "--resume"]) == 0
    assert Config.fromfile(tmp_path / "work_dirs/tiny/tiny.py").resume is False
