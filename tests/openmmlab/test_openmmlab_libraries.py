"""mmpretrain, mmsegmentation and mmdetection train, validate, save and resume with stock configurations.

`make openmmlab` installs the libraries in an environment of their own and runs these tests.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from library_data import write_cifar, write_cityscapes, write_coco

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"

CIFAR = ["train_dataloader.dataset.data_root={data}", "val_dataloader.dataset.data_root={data}"]
CITYSCAPES = [
    *CIFAR,
    "model.data_preprocessor.size=(64,64)",
    "train_dataloader.dataset.pipeline.2.scale=(128,64)",
    "train_dataloader.dataset.pipeline.3.crop_size=(64,64)",
    "val_dataloader.dataset.pipeline.1.scale=(128,64)",
    "train_cfg.val_interval=2",
    "default_hooks.checkpoint.interval=2",
]
COCO = [
    "train_dataloader.dataset.data_root={data}/",
    "val_dataloader.dataset.data_root={data}/",
    "val_evaluator.ann_file={data}/annotations/instances_val2017.json",
    "train_dataloader.dataset.pipeline.2.scale=(128,96)",
    "val_dataloader.dataset.pipeline.1.scale=(128,96)",
    "model.backbone.init_cfg=None",
    "model.bbox_head.num_classes=2",
]
COMMON = [
    "train_dataloader.num_workers=0",
    "val_dataloader.num_workers=0",
    "train_dataloader.persistent_workers=False",
    "val_dataloader.persistent_workers=False",
    "default_hooks.logger.interval=1",
]
RUNS = {
    "mmpretrain": ("resnet/resnet18_8xb16_cifar10.py", write_cifar, CIFAR, "max_epochs"),
    "mmseg": (
        "pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py",
        write_cityscapes,
        [*CITYSCAPES, "model.pretrained=None"],
        "max_iters",
    ),
    "mmdet": ("retinanet/retinanet_r18_fpn_1x_coco.py", write_coco, COCO, "max_epochs"),
}
METRICS = {"mmpretrain": "accuracy/top1", "mmseg": "mIoU", "mmdet": "Epoch(val)"}


def _folder(library):
    return Path(importlib.util.find_spec(library).origin).parent


def run(library, config, folder, *options):
    tools = _folder(library) / ".mim/tools/train.py"
    # Only the names of the replacement of torchvision that mmpretrain imports; see shims/torchvision.
    path = os.pathsep.join([str(SRC), str(HERE / "shims")])
    command = [
        sys.executable,
        "-m",
        "slipstream.openmmlab",
        tools,
        config,
        "--work-dir",
        folder / "work",
        *options,
    ]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=540,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("library", RUNS)
def test_a_stock_configuration_trains_validates_and_resumes(library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; run make openmmlab")
    if library != "mmpretrain" and not list(_folder("mmcv").glob("_ext*")):
        pytest.skip("mmcv is installed without its compiled operators, which this library imports")
    stock, write, options, length = RUNS[library]
    config = tmp_path / "config.py"
    base = _folder(library) / ".mim/configs" / stock
    extra = "custom_imports = dict(imports=['any_cifar'])\n" if library == "mmpretrain" else ""
    config.write_text(f"_base_ = {str(base)!r}\n{extra}")
    data = write(tmp_path / "data")
    changes = [option.format(data=data) for option in [*options, *COMMON]]
    first, last = (1, 2) if length == "max_epochs" else (2, 4)
    log = run(library, config, tmp_path, "--cfg-options", *changes, f"train_cfg.{length}={first}")
    assert "import mmengine now imports Slipstream" in log
    assert METRICS[library] in log
    assert "Saved checkpoint" in log
    log = run(library, config, tmp_path, "--resume", "--cfg-options", *changes, f"train_cfg.{length}={last}")
    assert "Resumed at epoch" in log
    assert (tmp_path / "work" / f"{'epoch' if length == 'max_epochs' else 'iter'}_{last}.pth").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "shapes"), [("mmdet", [[64, 96, 3], [32, 96, 3]]), ("mmseg", [[64, 96]])]
)
def test_the_inferencer_of_a_library_predicts_for_arrays(library, shapes, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; run make openmmlab")
    if not list(_folder("mmcv").glob("_ext*")):
        pytest.skip("mmcv is installed without its compiled operators, which this library imports")
    path = os.pathsep.join([str(SRC), str(HERE / "shims")])
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.openmmlab", str(HERE / "scripts/infer_stock.py"), library],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])
    assert result["shapes"] == shapes
    assert all(result["found"])
    assert result["params"]
    assert result["flops"] > 10**8
