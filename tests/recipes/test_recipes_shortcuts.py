"""All recipes accept the same shortcuts, in both recipe formats."""

import json
import logging

import pytest

from slipstream.cli.configure import load_config
from slipstream.cli.main import main
from slipstream.recipes import recipes
from slipstream.speed import SpeedPlan

pytest.importorskip("hydra")

SMALL = [name for name in recipes() if name.startswith(("camvid_", "street_scenes_"))]
WORDS = ["lr=0.05", "batch_size=3", "val_batch_size=2", "epochs=7", "num_workers=0", "data_root_dir=/mine"]


def plan(cfg):
    return SpeedPlan.read(
        speed=cfg.get("speed"),
        custom_hooks=cfg.get("custom_hooks"),
        training_params=cfg.get("training_params") or {},
    )


@pytest.mark.parametrize("name", SMALL)
def test_each_small_recipe_accepts_the_shortcuts(name, caplog):
    with caplog.at_level(logging.WARNING):
        cfg = load_config(name, WORDS).cfg
    assert cfg.optim_wrapper.optimizer.lr == 0.05
    assert (cfg.train_dataloader.batch_size, cfg.val_dataloader.batch_size) == (3, 2)
    assert (cfg.train_dataloader.num_workers, cfg.val_dataloader.num_workers) == (0, 0)
    assert cfg.train_cfg.max_epochs == 7
    if name.startswith("camvid"):
        assert [cfg[f"{split}_dataloader"].dataset.data_root for split in ("train", "val")] == ["/mine"] * 2
    else:
        assert "data_root_dir=/mine has no effect" in caplog.text


@pytest.mark.parametrize("name", SMALL)
def test_ema_is_enabled_and_disabled_by_its_shortcut(name):
    assert plan(load_config(name, ["ema=True"]).cfg).ema is not None
    assert plan(load_config(name, ["ema=False"]).cfg).ema is None


@pytest.mark.parametrize("name", SMALL)
def test_a_run_with_all_shortcuts_can_be_planned(name, capsys):
    assert main(["explain", name, *WORDS, "ema=True", "--json"]) == 0
    options = {row["option"] for row in json.loads(capsys.readouterr().out)["options"]}
    assert "ema" in options
    assert main(["explain", name, *WORDS, "ema=False", "--json"]) == 0
    assert "ema" in json.loads(capsys.readouterr().out)["off"]
