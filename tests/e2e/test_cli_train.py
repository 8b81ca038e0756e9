"""Tests of the commands train, val and predict with small images."""

import contextlib
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.cli.train import summary
from slipstream.logging import MessageHub

SMALL = [
    "train_dataloader.dataset.size=[64, 128]",
    "train_dataloader.dataset.length=8",
    "val_dataloader.dataset.size=[64, 128]",
    "val_dataloader.dataset.length=4",
    "train_cfg.max_epochs=2",
    "train_cfg.val_interval=1",
    "default_hooks.logger.interval=1",
    "param_scheduler.0.end=1",
    "param_scheduler.1.begin=1",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train the recipe of `make train` with small images, and return the work_dir. `last_line` has the last line."""
    from slipstream.cli.main import main

    folder, printed = tmp_path_factory.mktemp("run"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", "street_scenes_pp_lite_t", *SMALL, "--work-dir", str(folder)]) == 0
    (folder / "last_line").write_text(printed.getvalue().strip().splitlines()[-1])
    return folder


def test_training_writes_checkpoints_logs_and_a_picture(trained):
    assert torch.load(trained / "epoch_2.pth", weights_only=True)["meta"]["epoch"] == 2
    assert (trained / "last_checkpoint").read_text() == str(trained / "epoch_2.pth")
    assert list(trained.glob("best_mIoU_epoch_*.pth"))
    assert list(trained.glob("*/vis_data/events.out.tfevents.*"))
    lines = [
        json.loads(line) for line in next(trained.glob("*/vis_data/scalars.json")).read_text().splitlines()
    ]
    assert {"loss", "lr", "iter"} <= lines[0].keys()
    assert any("mIoU" in line for line in lines)
    with Image.open(trained / "predictions.png") as picture:
        assert picture.width >= 3 * 128


def test_last_line_has_output_paths_and_speed(trained):
    last = (trained / "last_line").read_text()
    assert re.search(r"mIoU \d", last)
    assert re.search(r"\d images/s", last)
    assert f"Checkpoints in {trained}, " in last
    assert f"pictures in {trained / 'predictions.png'}" in last


@pytest.mark.parametrize(("last", "shown"), [(31.0, "mIoU 31.00 (best 37.50)"), (37.5, "mIoU 37.50")])
def test_last_line_has_the_best_metric_if_it_is_not_the_last(tmp_path, last, shown):
    hub = MessageHub("run")
    for value in (37.5, last):
        hub.update_scalar("val/mIoU", value)
    hub.update_scalar("val/aAcc", 80)  # the best checkpoint is not selected by this metric
    hub.update_info("best_score/mIoU", 37.5)
    runner = SimpleNamespace(message_hub=hub, work_dir=str(tmp_path), log_dir=str(tmp_path / "logs"))
    assert summary(runner).startswith(f"Done: {shown}, aAcc 80.00. Checkpoints in ")


def test_val_prints_the_metrics_of_the_last_validation(trained, capsys):
    from slipstream.cli.main import main

    assert main(["val", "street_scenes_pp_lite_t", *SMALL, "--work-dir", str(trained)]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    lines = [
        json.loads(line) for line in next(trained.glob("*/vis_data/scalars.json")).read_text().splitlines()
    ]
    logged = [line for line in lines if "mIoU" in line][-1]
    assert f"mIoU {logged['mIoU']:.4f}" in last


def test_resuming_a_complete_run_does_not_change_checkpoints(trained):
    from slipstream.cli.main import main

    before = (trained / "epoch_2.pth").read_bytes()
    assert main(["train", "street_scenes_pp_lite_t", *SMALL, "--work-dir", str(trained), "--resume"]) == 0
    assert (trained / "epoch_2.pth").read_bytes() == before


def test_predict_writes_color_masks_at_image_size(trained, command, tmp_path):
    from slipstream.dataset import CITYSCAPES_PALETTE
    from slipstream.zoo.street_scenes import draw_street_scene

    image, _ = draw_street_scene(3, 0, (96, 160))
    Image.fromarray(image).save(tmp_path / "street.png")
    done = command("predict", "street.png", "--checkpoint", str(trained / "epoch_2.pth"), "--out", "masks")
    assert "street_mask.png" in done.out
    with Image.open(tmp_path / "masks" / "street_mask.png") as mask:
        colors = {tuple(c) for c in np.asarray(mask.convert("RGB")).reshape(-1, 3).tolist()}
        assert mask.size == (160, 96)
    assert colors <= {tuple(c) for c in CITYSCAPES_PALETTE}
    assert (tmp_path / "masks" / "street_overlay.png").is_file()


def test_predict_reports_an_invalid_output_folder(trained, capsys):
    from slipstream.cli.main import main

    file = str(trained / "epoch_2.pth")
    assert main(["predict", "street.png", "--checkpoint", file, "--out", file]) == 2
    assert capsys.readouterr().err.startswith("slipstream: error: --out: cannot write to the folder")


@pytest.mark.parametrize(
    ("key", "value"),
    [("meta", [1]), ("dataset_meta", 3), ("state_dict", None)],
)
def test_predict_names_an_invalid_entry_in_the_checkpoint(trained, tmp_path, capsys, key, value):
    from slipstream.cli.main import main

    content = torch.load(trained / "epoch_2.pth", weights_only=True)
    place = {"palette": content["meta"]["dataset_meta"], "dataset_meta": content["meta"]}.get(key, content)
    place[key] = value
    torch.save(content, tmp_path / "changed.pth")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    out = str(tmp_path / "masks")
    assert main(
        ["predict", str(tmp_path / "a.png"), "--checkpoint", str(tmp_path / "changed.pth"), "--out", out]
    )
    error = capsys.readouterr().err
    assert f"{key}'" in error or f"{key}[" in error
    assert "Traceback" not in error


def test_predict_reports_the_name_of_a_broken_image(trained, command, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    err = command("predict", "broken.png", "--checkpoint", str(trained / "epoch_2.pth"), status=1).err
    assert "broken.png" in err
    assert len(err.strip().splitlines()) == 1


def test_predict_ignores_base_and_imports_in_a_checkpoint(trained, command, tmp_path):
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('was_here').touch()\nmodel = dict()\n")
    checkpoint = torch.load(trained / "epoch_2.pth", weights_only=True)
    checkpoint["meta"]["cfg"] += f"\n_base_: {tmp_path}/evil.py\ncustom_imports: {{imports: [evil]}}\n"
    torch.save(checkpoint, tmp_path / "evil.pth")
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "black.png")
    command("predict", "black.png", "--checkpoint", "evil.pth", status=None)
    assert not (tmp_path / "was_here").exists()


def test_options_can_be_enabled_on_the_command_line(command):
    one = [
        "train_cfg.max_epochs=1",
        "train_dataloader.num_batch_per_epoch=2",
        "optim_wrapper.accumulative_counts=2",
    ]
    amp = ["optim_wrapper.type=AmpOptimWrapper", "optim_wrapper.dtype=bfloat16"]
    assert "Trained for 2 steps" in command("train", "street_scenes_pp_lite_t", *SMALL, *one, *amp).out
