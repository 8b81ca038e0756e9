"""Recipes produce the same results on an NPU as on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

COMPOSED = Path(__file__).resolve().parents[1] / "recipes/composed"
COMMANDS = {
    "street_scenes_pp_lite_t": [
        "slipstream", "train", "street_scenes_pp_lite_t",
        *(f"{split}_dataloader.dataset.{key}" for split in ("train", "val") for key in ("size=[64,128]", "length=8")),
        "train_cfg.max_epochs=1", "param_scheduler=null",
    ],
    "composed_regseg48": [
        "slipstream.train_from_recipe", "--config-name=composed_regseg48", f"--config-dir={COMPOSED}", "num_gpus=1",
        "epochs=1", "batch_size=2", "val_batch_size=2", "num_workers=0", "training_params.run_validation_freq=1",
        *(f"dataset_params.{split}_dataset_params.{key}" for split in ("train", "val")
          for key in ("size=[64,128]", "length=4")),
    ],
}  # fmt: skip


def train(command, folder, device):
    """Run `command` in `folder`, and return the weights in the last checkpoint."""
    folder.mkdir()
    autoload = dict(TORCH_DEVICE_BACKEND_AUTOLOAD=str(int(device == "npu")))
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | autoload,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = [path for path in folder.rglob("*.pth") if path.name in ("epoch_1.pth", "ckpt_latest.pth")]
    saved = torch.load(path, weights_only=True)
    log = next(folder.rglob("*.log")).read_text()
    assert f"device {device}" in log
    return saved.get("state_dict", saved.get("net"))


@pytest.mark.parametrize("name", COMMANDS)
def test_recipe_results_match_the_cpu(name, tmp_path):
    found, expected = (train(COMMANDS[name], tmp_path / device, device) for device in ("npu", "cpu"))
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
