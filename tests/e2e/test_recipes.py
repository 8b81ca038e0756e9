"""Tests of the recipes with small datasets, few batches and small crops."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.cli.configure import load_config
from slipstream.cli.main import main
from slipstream.recipes import recipes
from slipstream.registry import MODELS
from slipstream.zoo import models
from slipstream.zoo.street_scenes.folder import write_street_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from predecessor_recipes import RECIPES

# A folder with a recipe in SuperGradients' syntax that needs no data.
COMPOSED = str(Path(__file__).resolve().parents[1] / "recipes/composed")
DOCS = Path(__file__).resolve().parents[2] / "docs/supergradients"
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
NETWORKS = {
    "cityscapes_pplite_seg50": ["pp_lite_t_seg", "pp_lite_b_seg"],
    "cityscapes_pplite_seg75": ["pp_lite_t_seg", "pp_lite_b_seg"],
    "cityscapes_stdc_seg50": ["stdc1_seg", "stdc2_seg"],
    "cityscapes_stdc_seg75": ["stdc1_seg", "stdc2_seg"],
    "cityscapes_ddrnet": ["ddrnet_23", "ddrnet_23_slim", "ddrnet_39"],
    "cityscapes_regseg48": ["regseg48"],
    "cityscapes_segformer": ["segformer_b0"],
    **{f"cityscapes_segformer_b{size}": [f"segformer_b{size}"] for size in range(6)},
}
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
        "ckpt_latest.pth", "ckpt_best.pth", "average_model.pth", "lr_schedule.png",
    }  # fmt: skip


def test_val_and_predict_use_the_written_checkpoints(cityscapes, capsys):
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
    run("submit", "cityscapes_regseg48", *arguments, "--dry-run")
    assert "slipstream train cityscapes_regseg48" in capsys.readouterr().out


def test_pretrained_weights_of_a_recipe_are_validated_without_training(capsys):
    weights = models.get("regseg48", num_classes=19).state_dict()
    torch.save({"net": weights}, "theirs.pth")
    size = [
        "--config-dir", COMPOSED, "dataset_params.val_dataset_params.size=[64,128]",
        "dataset_params.val_dataset_params.length=2",
    ]  # fmt: skip
    arguments = [*size, "checkpoint_params.checkpoint_path=theirs.pth"]
    run("val", "composed_regseg48", *arguments)
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    own = Path("ours.pth")
    torch.save({"state_dict": {f"network.{name}": value for name, value in weights.items()}}, own)
    run("val", "composed_regseg48", *size, "--checkpoint", str(own))
    assert capsys.readouterr().out.strip().splitlines()[-1] == printed
    assert main(["val", "composed_regseg48", *arguments, "checkpoint_params.load_backbone=true"]) == 1
    assert "no checkpoint found in" in capsys.readouterr().err


def test_a_runner_recipe_starts_with_the_pretrained_weights():
    weights = models.get("regseg48", num_classes=19).state_dict()
    torch.save({"net": weights}, "theirs.pth")
    small = [
        "train_dataloader.dataset.length=4",
        "train_dataloader.dataset.size=[64,128]",
        "lr=0",
        "ema=False",
    ]
    run("train", "street_scenes_regseg48", *small, *ONE_EPOCH, "model.pretrained.checkpoint_path=theirs.pth",
        "val_dataloader.dataset.length=2", "val_dataloader.dataset.size=[64,128]")  # fmt: skip
    found = torch.load("work_dirs/street_scenes_regseg48/epoch_1.pth", weights_only=True)["state_dict"]
    parameters = dict(models.get("regseg48", num_classes=19).named_parameters())
    for name in parameters:
        assert torch.equal(found[f"network.{name}"], weights[name]), name


def test_run_resumes_from_its_last_checkpoint(cityscapes, capsys):
    arguments = ["experiment_name=run", f"data_root_dir={cityscapes}", *FEW, *SMALL_CROPS]
    run("train", "cityscapes_regseg48", *arguments)
    run("train", "cityscapes_regseg48", *arguments, "epochs=2", "resume=True")
    assert checkpoint("run")["meta"]["epoch"] == 2
    assert "Resumed" in capsys.readouterr().out


@pytest.mark.parametrize(("recipe", "architecture"), [(r, a) for r, names in NETWORKS.items() for a in names])
def test_each_recipe_builds_its_network_and_loss(recipe, architecture):
    cfg = load_config(recipe, [f"architecture={architecture}"]).cfg
    with torch.device("meta"):
        model = MODELS.build(cfg.model)
    assert sum(p.numel() for p in model.network.parameters()) > 1e6
    assert cfg.model.network.type == architecture
    assert cfg.train_dataloader.dataset.type == "CityscapesDataset"
    assert cfg.work_dir.startswith("work_dirs/")


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


def test_file_lists_replace_a_split(cityscapes):
    Path("mine.yaml").write_text(
        RECIPES["regseg48"]
        + "\ndataset_params:\n"
        + "".join(
            f"  {split}_dataset_params:\n    root_dir: {cityscapes}\n    list_file: lists/{split}.lst\n"
            "    labels_csv_path: lists/labels.csv\n"
            for split in ("train", "val")
        )
    )
    run("train", "mine.yaml", *FEW, *SMALL_CROPS, "experiment_name=mine")
    assert checkpoint("mine")["meta"]["epoch"] == 1


def test_cifar10_trains_on_the_binary_version():
    folder = Path("data/cifar10/cifar-10-batches-bin")
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 256, (10_000, 3073), np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
    (folder / "batches.meta.txt").write_text(
        "airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n"
    )
    run("train", "cifar10_resnet", *FEW)
    assert checkpoint("resnet18_cifar")["meta"]["epoch"] == 1


def test_warning_names_the_batch_size_if_there_are_fewer_gpus_than_expected(cityscapes, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    few = [word for word in FEW if not word.startswith("num_gpus")]
    run(
        "train",
        "cityscapes_regseg48",
        "experiment_name=run",
        f"data_root_dir={cityscapes}",
        *few,
        *SMALL_CROPS,
    )
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "GPUs" in line]
    assert "1 x 2 instead of 4 x 2" in warning
    assert "batch_accumulate=4" in warning


@pytest.mark.parametrize(("found", "started"), [(8, "4"), (3, "3")])
def test_recipe_for_several_gpus_starts_a_process_per_gpu(found, started, monkeypatch):
    from slipstream.cli import train

    asked = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found)
    monkeypatch.setattr(train, "launch", lambda args, work_dir: asked.append((args.nproc, work_dir)) or 0)
    run("train", "cityscapes_regseg48")
    run("train", "cityscapes_regseg48", "num_gpus=-1")
    assert asked == [(n, "work_dirs/regseg48_cityscapes") for n in (started, str(found))]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["training_params.max_epoch=3"], ["training_params.max_epoch", "did you mean 'max_epochs'"]),
        (["architecture=regseg4"], ["regseg4", "did you mean 'regseg48'"]),
        (["checkpoint_params.checkpoint_pth=x"], ["checkpoint_params.checkpoint_pth", "'checkpoint_path'"]),
        (
            ["checkpoint_params.pretrained_weights=imagenet"],
            ["weights are not downloaded by name", "checkpoint_path"],
        ),
        (["multi_gpu=DPP"], ["multi_gpu", "'DPP'"]),
        (["num_gpus=many"], ["num_gpus", "'many'"]),
        (["train_dataloader=cityscape_train"], ["train_dataloader", "'cityscapes_train'"]),
        (["architecture=null"], ["architecture", "missing"]),
        (["data_root_dir=nowhere"], ["nowhere"]),
        (["arch_params.num_classes=18"], ["18", "19"]),
    ],
)
def test_invalid_argument_raises_a_one_line_error_with_config_path(arguments, expected, cityscapes, capsys):
    data = [] if any("data_root" in word for word in arguments) else [f"data_root_dir={cityscapes}"]
    assert main(["train", "cityscapes_regseg48", *data, *FEW, *SMALL_CROPS, *arguments]) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slipstream: error")]
    assert len(lines) == 1
    for part in expected:
        assert part in lines[0]


def test_recipe_variables_are_accepted_and_near_misses_logged(caplog):
    from slipstream.recipes import compose
    from slipstream.training.recipe import recipe_config

    recipe = compose("composed_regseg48", config_dir=COMPOSED)
    recipe_config({**recipe, "my_colour": 3, "multi_gpus": "DDP"})
    said = [record.message for record in caplog.records if "unknown recipe key" in record.message]
    assert len(said) == 1
    assert "'multi_gpus'" in said[0]
    assert "'multi_gpu'" in said[0]


def test_pages_are_short_and_name_every_family():
    text = " ".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert all(len(page.read_text(encoding="utf-8").splitlines()) <= 80 for page in DOCS.glob("*.md"))
    for name in recipes():
        if name.startswith("cityscapes") and not re.search(r"segformer_b\d", name):
            assert name in text or name.replace("seg75", "seg50") in text
