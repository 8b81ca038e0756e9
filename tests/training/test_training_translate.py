"""Translation of training_params, network and loaders to a Runner configuration."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream.training.recipe import runner_config

PARAMS = dict(max_epochs=4, initial_lr=0.1, lr_mode="poly", loss="CrossEntropyLoss")
DATA = dict(batch_size=2, dataset=dict(type="StreetScenes", length=4))
NETWORK = dict(type="resnet18", num_classes=2)


def translated(*, params=None, **changes):
    return runner_config(
        **{
            "experiment_name": "exp",
            "ckpt_root_dir": "/runs",
            "model": {"network": NETWORK},
            "training_params": {**PARAMS, **(params or {})},
            "train_dataloader": DATA,
            "val_dataloader": DATA,
            **changes,
        }
    )


def hook(cfg, kind):
    return next((h for h in cfg["custom_hooks"] if isinstance(h, dict) and h["type"] == kind), None)


def test_plain_recipe_is_translated_to_a_plain_configuration():
    cfg = translated(
        params=dict(
            valid_metrics_list=["PixelAccuracy"], metric_to_watch="PixelAccuracy", ema=True, precise_bn=True
        )
    )
    assert json.loads(json.dumps(cfg)) == cfg


def test_batches_are_limited_in_configurations_and_loader_objects():
    ready = DataLoader(TensorDataset(torch.zeros(8, 4)), 2)
    cfg = translated(params=dict(max_train_batches=3, max_valid_batches=1), val_dataloader=ready)
    assert cfg["train_dataloader"] == {**DATA, "num_batch_per_epoch": 3}
    assert cfg["val_dataloader"] == {"dataloader": ready, "num_batch_per_epoch": 1}
    assert translated(val_dataloader=ready)["val_dataloader"] is ready


# ---- checkpoints and hooks -------------------------------------------------------------------------------


def test_checkpoint_hook_has_supergradients_file_names_and_metric_to_watch():
    params = dict(
        valid_metrics_list=["PixelAccuracy"],
        metric_to_watch="pixel_accuracy",
        greater_metric_to_watch_is_better=False,
        ckpt_best_name="best_of_all.pth",
        save_ckpt_epoch_list=[1, 3],
        run_validation_freq=2,
    )
    cfg = translated(params=params)
    assert cfg["default_hooks"]["checkpoint"] == dict(
        type="CheckpointHook",
        interval=2,
        filename_tmpl="ckpt_latest.pth",
        save_best="PixelAccuracy",
        rule="less",
        best_filename="best_of_all.pth",
        save_epochs=[1, 3],
    )
    assert hook(cfg, "AverageBestHook") == dict(type="AverageBestHook", metric="PixelAccuracy", rule="less")


@pytest.mark.parametrize(
    ("params", "resume"),
    [
        ({}, False),
        (dict(resume=True), True),
        (dict(resume=True, ckpt_name="ckpt_best.pth"), "/runs/exp/ckpt_best.pth"),
        (dict(ckpt_name="ckpt_best.pth"), False),
        (dict(resume_path="/else/where.pth"), "/else/where.pth"),
    ],
)
def test_resume_keys_select_the_checkpoint(params, resume):
    assert translated(params=params)["resume"] == resume


# ---- loggers ---------------------------------------------------------------------------------------------
