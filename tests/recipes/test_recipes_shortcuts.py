"""All recipes accept the same shortcuts, in both recipe formats."""

import json
import logging

import pytest

from slipstream.cli.configure import load_config
from slipstream.cli.main import main
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.recipes import find_recipe, is_composed, recipes
from slipstream.speed import SpeedPlan

pytest.importorskip("hydra")

SMALL = [name for name in recipes() if name.startswith(("camvid_", "street_scenes_"))]
ALL = list(recipes())
MISSPELLED = {
    "learning_rate": "lr", "initial_lr": "lr", "lrs": "lr", "bach_size": "batch_size", "max_epochs": "epochs",
    "num_epochs": "epochs", "epoch": "epochs", "workers": "num_workers", "num_worker": "num_workers",
    "emaa": "ema", "use_ema": "ema", "data_root": "data_root_dir", "data_dir": "data_root_dir",
    "root_dir": "data_root_dir", "root": "data_root_dir", "data_root_dirs": "data_root_dir",
}  # fmt: skip
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
def test_recipes_for_small_datasets_have_the_runners_keys(name):
    assert not is_composed(find_recipe(name))


@pytest.mark.parametrize("name", SMALL)
def test_a_run_with_all_shortcuts_can_be_planned(name, capsys):
    assert main(["explain", name, *WORDS, "ema=True", "--json"]) == 0
    options = {row["option"] for row in json.loads(capsys.readouterr().out)["options"]}
    assert "ema" in options
    assert main(["explain", name, *WORDS, "ema=False", "--json"]) == 0
    assert "ema" in json.loads(capsys.readouterr().out)["off"]


@pytest.mark.parametrize("name", [name for name in ALL if name not in SMALL])
def test_supergradients_recipes_accept_the_same_shortcuts(name):
    cfg = load_config(name, [*WORDS, "ema=True", "num_gpus=1"]).cfg
    assert cfg.optim_wrapper.optimizer.lr == 0.05
    assert (cfg.train_dataloader.batch_size, cfg.val_dataloader.batch_size) == (3, 2)
    assert (cfg.train_dataloader.num_workers, cfg.val_dataloader.num_workers) == (0, 0)
    assert cfg.train_cfg.max_epochs == 7
    dataset = cfg.train_dataloader.dataset
    assert str(dataset.get("root_dir") or dataset.root).startswith("/mine")
    assert plan(cfg).ema is not None


def test_the_starter_recipe_accepts_the_shortcuts(tmp_path, monkeypatch, capsys):
    assert main(["new", str(tmp_path / "project")]) == 0
    file = tmp_path / "project/recipe.py"
    assert not is_composed(file)
    cfg = load_config(str(file), [*WORDS, "ema=True"]).cfg
    assert (cfg.optim_wrapper.optimizer.lr, cfg.train_dataloader.batch_size, cfg.train_cfg.max_epochs) == (
        0.05,
        3,
        7,
    )
    assert plan(cfg).ema is not None


@pytest.mark.parametrize("name", ["camvid_stdc1_seg", "street_scenes_regseg48", "cityscapes_regseg48"])
@pytest.mark.parametrize("word", MISSPELLED)
def test_an_unknown_word_suggests_the_shortcut(name, word):
    with pytest.raises(UnknownNameError, match=f"^{word}: .*did you mean '{MISSPELLED[word]}'"):
        load_config(name, [f"{word}=1"])


def test_a_key_in_the_configuration_is_not_a_shortcut(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("lr = 0.5\nmodel = dict()\noptim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))\n")
    cfg = load_config(str(file), ["lr=0.2"]).cfg
    assert (cfg.lr, cfg.optim_wrapper.optimizer.lr) == (0.2, 0.1)


def test_ema_true_adds_the_average_to_a_recipe_without_one(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("model = dict()\noptim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))\n")
    assert load_config(str(file), ["ema=True"]).cfg.speed.ema is True


def test_python_variable_with_the_name_of_a_shortcut_is_not_overridden_silently(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "batch_size = 4\nmodel = dict(type='Segmentor')\ntrain_dataloader = dict(batch_size=batch_size)\n"
    )
    with pytest.raises(ConfigError, match=r"variable .* instead: train_dataloader\.batch_size"):
        load_config(str(file), ["batch_size=2"])
