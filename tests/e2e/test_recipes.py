"""Tests of the recipes with small datasets, few batches and small crops."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.cli.main import main
from slipstream.recipes import recipes
from slipstream.zoo.street_scenes.folder import write_street_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from predecessor_folder import RECIPES

FEW = [
    "num_gpus=1", "epochs=1", "batch_size=2", "val_batch_size=1", "num_workers=0", "training_params.lr_warmup_epochs=0",
    "training_params.max_train_batches=2", "training_params.max_valid_batches=1",
    "training_params.run_validation_freq=1",
]  # fmt: skip
TRANSFORMS = "dataset_params.train_dataset_params.transforms"
SMALL_CROPS = [f"{TRANSFORMS}.{i}.{name}.crop_size=[64,64]" for i, name in (
    (3, "SegPadShortToCropSize"), (4, "SegCropImageAndMask"),
)]  # fmt: skip
SMALL_VALIDATION = [
    "dataset_params.val_dataset_params.transforms.0.SegRescale.long_size=128",
    "dataset_params.val_dataset_params.transforms.1.SegPadShortToCropSize.crop_size=[128,128]",
]
ONE_EPOCH = ["epochs=1", "batch_size=2", "train_cfg.val_interval=1", "param_scheduler=null"]
TRAINED = [
    ("cityscapes_pplite_seg50", "pp_lite_t_seg"), ("cityscapes_pplite_seg75", "pp_lite_t_seg"),
    ("cityscapes_stdc_seg50", "stdc1_seg"), ("cityscapes_stdc_seg75", "stdc1_seg"),
    ("cityscapes_regseg48", "regseg48"), ("cityscapes_ddrnet", "ddrnet_23_slim"),
    ("cityscapes_segformer", "segformer_b0"),
]  # fmt: skip


@pytest.fixture(scope="module")
def cityscapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cityscapes")
    write_street_folder(folder, train=4, val=2, size=(128, 256))
    return folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    assert main(list(arguments)) == 0


def checkpoint(name):
    return torch.load(Path("work_dirs") / name / "ckpt_latest.pth", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "architecture"), TRAINED)
def test_each_cityscapes_recipe_trains_on_the_original_layout(recipe, architecture, cityscapes, capsys):
    arguments = [
        f"architecture={architecture}",
        "experiment_name=run",
        f"data_root_dir={cityscapes}",
        *FEW,
        *SMALL_CROPS,
    ]
    if "segformer" in recipe:
        arguments += SMALL_VALIDATION
    run("train", recipe, *arguments)
    out = capsys.readouterr().out
    assert re.search(r"IoU 0\.\d+", out)
    saved = checkpoint("run")
    assert all(
        tensor.isfinite().all() for tensor in saved["state_dict"].values() if tensor.is_floating_point()
    )
    assert {path.name for path in Path("work_dirs/run").glob("*.p*")} >= {
        "ckpt_latest.pth", "ckpt_best.pth", "average_model.pth",
    }  # fmt: skip


def test_val_predict_and_resume_use_the_written_checkpoints(cityscapes, capsys):
    arguments = ["experiment_name=run", f"data_root_dir={cityscapes}", *FEW, *SMALL_CROPS]
    run("train", "cityscapes_regseg48", *arguments)
    run("val", "cityscapes_regseg48", *arguments)
    assert re.search(r"IoU 0\.\d+", capsys.readouterr().out)
    misspelled = "training_params.valid_metrics_list=[{IoU: {num_clases: 20}}]"
    assert main(["val", "cityscapes_regseg48", *arguments, misspelled]) == 2
    assert "error: training_params.valid_metrics_list[0]: " in capsys.readouterr().err
    photo = next(cityscapes.glob("leftImg8bit/val/*/*.png"))
    run("predict", str(photo), "--out", "masks")
    mask = np.asarray(Image.open(f"masks/{photo.stem}_mask.png"))
    assert mask.shape[:2] == (128, 256)
    run("explain", "cityscapes_regseg48", *arguments)
    explained = capsys.readouterr().out
    assert "training_params.ema" in explained
    assert "training_params.sync_bn" in explained
    run("data", "stats", "cityscapes_regseg48", *arguments)
    run("train", "cityscapes_regseg48", *arguments, "epochs=2", "resume=True")
    assert checkpoint("run")["meta"]["epoch"] == 2
    assert "Resumed" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("street_scenes")])
def test_street_scenes_recipes_require_no_data(name):
    sizes = [f"{split}_dataloader.dataset.size=[64,128]" for split in ("train", "val")]
    lengths = ["train_dataloader.dataset.length=4", "val_dataloader.dataset.length=2"]
    run("train", name, *ONE_EPOCH, *sizes, *lengths)
    (best,) = Path("work_dirs", name).glob("best_mIoU_epoch_1.pth")
    assert torch.load(best, weights_only=True)["meta"]["epoch"] == 1


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("camvid")])
def test_camvid_recipes_train_on_a_folder_of_photos_and_masks(name):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for folder, shape, top in ((split, (96, 128, 3), 255), (f"{split}annot", (96, 128), 12)):
            Path("data/camvid", folder).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, top, shape, np.uint8)
                Image.fromarray(pixels).save(Path("data/camvid", folder, f"{i}.png"))
    crops = [f"train_dataloader.dataset.transforms.{i}.crop_size=[64,64]" for i in (1, 2)]
    run("train", name, *ONE_EPOCH, *crops, "num_workers=0")
    assert Path("work_dirs", name, "epoch_1.pth").is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_supergradients_recipe_trains_unchanged(name, cityscapes):
    Path("mine.yaml").write_text(RECIPES[name])
    arguments = [f"data_root_dir={cityscapes}", *FEW, *SMALL_CROPS, "experiment_name=mine"]
    run("train", "mine.yaml", *arguments)
    assert checkpoint("mine")["meta"]["epoch"] == 1


@pytest.mark.parametrize(("found", "started"), [(8, "4"), (3, "3")])
def test_recipe_for_several_gpus_starts_a_process_per_gpu(found, started, monkeypatch):
    from slipstream.cli import train

    asked = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found)
    monkeypatch.setattr(train, "launch", lambda args, work_dir: asked.append((args.nproc, work_dir)) or 0)
    run("train", "cityscapes_regseg48")
    run("train", "cityscapes_regseg48", "num_gpus=-1")
    assert asked == [(n, "work_dirs/regseg48_cityscapes") for n in (started, str(found))]
