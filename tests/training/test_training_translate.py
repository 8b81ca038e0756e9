"""Translation of training_params, network and loaders to a Runner configuration."""

import json

import pytest

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


def test_plain_recipe_is_translated_to_a_plain_configuration():
    cfg = translated(
        params=dict(
            valid_metrics_list=["PixelAccuracy"], metric_to_watch="PixelAccuracy", ema=True, precise_bn=True
        )
    )
    assert json.loads(json.dumps(cfg)) == cfg


# ---- checkpoints and hooks -------------------------------------------------------------------------------


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
