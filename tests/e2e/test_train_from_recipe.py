"""Tests of `python -m slipstream.train_from_recipe`, SuperGradients' command with Hydra's options."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from slipstream.train_from_recipe import best_value, main

# A recipe in SuperGradients' syntax that needs no data.
COMPOSED = Path(__file__).resolve().parents[1] / "recipes/composed"
RECIPE = ("--config-name=composed_regseg48", f"--config-dir={COMPOSED}")

SIZES = [
    f"dataset_params.{split}_dataset_params.{word}"
    for split in ("train", "val")
    for word in ("size=[64,128]", "length=2")
]
SMALL = [
    "num_gpus=1", "epochs=1", "batch_size=2", "val_batch_size=2", "num_workers=0", *SIZES,
    *(f"training_params.{word}=1" for word in ("max_train_batches", "max_valid_batches", "run_validation_freq")),
]  # fmt: skip


@pytest.fixture
def from_recipe(run):
    """Return a function that runs `python -m slipstream.train_from_recipe ARGS`."""
    return lambda *args, **kwargs: run("-m", "slipstream.train_from_recipe", *args, **kwargs)


def everything(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}


@pytest.mark.slow
def test_recipe_trains_without_hydra_output_folders(from_recipe, tmp_path):
    done = from_recipe(*RECIPE, *SMALL, "training_params.torch_compile=False")
    assert "Done: " in done.stdout
    written = everything(tmp_path)
    assert "work_dirs/composed_regseg48/ckpt_latest.pth" in written
    assert all(name.startswith("work_dirs") for name in written)
    assert not any(".hydra" in name or "multirun" in name for name in written)


@pytest.mark.slow
def test_multirun_has_a_folder_per_run(from_recipe, tmp_path):
    done = from_recipe(*RECIPE, "--multirun", "lr=0.001,0.002", *SMALL)
    assert done.stdout.count("Done: ") == 2
    (sweep,) = (tmp_path / "work_dirs/composed_regseg48").iterdir()
    rates = []
    for run in ("0", "1"):
        saved = torch.load(sweep / run / "ckpt_latest.pth", weights_only=True)
        rates.append(yaml.safe_load(saved["meta"]["cfg"])["optim_wrapper"]["optimizer"]["lr"])
    assert rates == [0.001, 0.002]
    assert all(name.startswith("work_dirs") for name in everything(tmp_path))


@pytest.mark.slow
def test_failed_run_of_a_multirun_does_not_stop_the_others(from_recipe, tmp_path):
    word = "dataset_params.train_dataset_params.length"
    arguments = [*(w for w in SMALL if not w.startswith(word)), f"{word}=0,2"]
    done = from_recipe(*RECIPE, "-m", *arguments, status=1)
    assert done.stdout.count("Done: ") == 1
    assert "run 0 failed" in done.stderr


def test_cfg_job_prints_the_recipe_without_training(from_recipe, tmp_path):
    arguments = ["--config-name=cityscapes_pplite_seg75", "--cfg", "job"]
    shown = yaml.safe_load(from_recipe(*arguments, "training_params.torch_compile=True").stdout)
    assert shown["training_hyperparams"]["torch_compile"] is True
    assert shown["training_hyperparams"]["initial_lr"] == {"encoder.backbone": 0.01, "default": 0.1}
    assert shown["experiment_name"] == "${architecture}75_cityscapes"
    assert (
        yaml.safe_load(from_recipe(*arguments, "--resolve").stdout)["experiment_name"]
        == "pp_lite_t_seg75_cityscapes"
    )
    assert everything(tmp_path) == set()


def test_recipes_in_runner_syntax_also_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = [
        f"{split}_dataloader.dataset.{word}"
        for split in ("train", "val")
        for word in ("size=[64,128]", "length=4")
    ]
    few = ["train_cfg.max_epochs=1", "train_cfg.val_interval=1", "param_scheduler=null", "+compile=false"]
    assert main(["--config-name=street_scenes_pp_lite_t", *sizes, *few]) == 0
    assert "work_dirs/street_scenes_pp_lite_t" in everything(tmp_path)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        (dict(save_best="loss"), 0.4),
        (dict(save_best="val/loss", rule="greater"), 0.6),
        (dict(save_best=["mIoU", "loss"]), 70.0),
        (dict(save_best="score", rule="less"), 1.0),
        (dict(save_best="score"), None),
        (dict(), None),
    ],
)
def test_search_gets_the_best_value_of_validation_by_the_hooks_rule(tmp_path, options, best):
    lines = [dict(step=9, loss=0.01, iter=9)]
    lines += [{"step": i, "val/loss": v, "mIoU": m, "score": s} for i, v, m, s in [
        (1, 0.6, 70.0, 2.0), (2, 0.4, 60.0, 1.0), (3, None, None, None)]]  # fmt: skip
    log = tmp_path / "20260101_000000/vis_data/scalars.json"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(map(json.dumps, lines)))
    recipe = dict(
        model=dict(type="Net"), default_hooks=dict(checkpoint=dict(type="CheckpointHook", **options))
    )
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert best_value("mine", [], str(tmp_path), tmp_path) == best


@pytest.mark.slow
def test_optuna_searches_the_recipe_on_the_page(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    monkeypatch.chdir(tmp_path)
    sizes = [
        f"{split}_dataloader.dataset.{word}"
        for split in ("train", "val")
        for word in ("size=[64,128]", "length=4")
    ]
    few = ["train_cfg.max_epochs=1", "train_cfg.val_interval=1", "param_scheduler=null", "+compile=false"]
    search = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=2"]
    rate = "optim_wrapper.optimizer.lr=tag(log,interval(1e-4,1e-1))"
    assert main(["--config-name=street_scenes_pp_lite_t", "--multirun", *search, rate, *sizes, *few]) == 0
    (results,) = tmp_path.rglob("optimization_results.yaml")
    found = yaml.safe_load(results.read_text())
    logs = [
        json.loads(line) for log in tmp_path.rglob("scalars.json") for line in log.read_text().splitlines()
    ]
    assert found["best_value"] == max(line["mIoU"] for line in logs if "mIoU" in line)
