"""Test that unsafe file names and templates in configurations are rejected, such as paths outside the output folder."""

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.files import check_name
from slipstream.hooks import AverageBestHook, CheckpointHook
from slipstream.visualization import LocalVisBackend
from tiny_runs import run

OUTSIDE = ["../../x{}", "/tmp/x{}", "a/../../x{}", "..", "x\0{}"]


@pytest.mark.parametrize("name", [name.replace("{}", "") for name in OUTSIDE] + [""])
def test_names_that_refer_to_paths_outside_the_folder_are_rejected(name):
    with pytest.raises(
        ConfigError, match=r"^key: must be the name of a file inside the work_dir, without '\.\.'"
    ):
        check_name(name, "key")


@pytest.mark.parametrize("name", ["x", "a/x", "a/../x", "..x", "...", "x..y/z", "~/x"])
def test_names_inside_the_folder_are_accepted(name):
    assert check_name(name, "key") == name


@pytest.mark.parametrize("name", OUTSIDE)
def test_checkpoint_names_outside_the_folder_are_rejected(name):
    remedy = r"inside the checkpoint folder \(set out_dir to use a different folder\)"
    with pytest.raises(ConfigError, match=f"filename_tmpl: .*{remedy}"):
        CheckpointHook(interval=1, filename_tmpl=name + ".pth" if name != ".." else name)
    with pytest.raises(ConfigError, match=f"best_filename: .*{remedy}"):
        CheckpointHook(interval=1, save_best="acc", rule="greater", best_filename=name)
    with pytest.raises(ConfigError, match="filename: must be"):
        AverageBestHook("acc", rule="greater", filename=name)


def test_image_and_scalar_names_outside_the_folder_are_rejected(tmp_path):
    folder = tmp_path / "a" / "b"
    image = np.zeros((2, 2, 3), np.uint8)
    for options in (
        {"img_save_dir": "../../x"},
        {"config_save_file": "/x.py"},
        {"scalar_save_file": "../x.json"},
    ):
        with pytest.raises(ConfigError, match=rf"{next(iter(options))}: .*inside the backend's save_dir"):
            LocalVisBackend(folder, **options)
    backend = LocalVisBackend(folder)
    for name in ("../../../x", "/x"):
        with pytest.raises(ConfigError, match=r"name: .*inside the backend's save_dir"):
            backend.add_image(name, image)
        with pytest.raises(ConfigError, match=r"file_path: .*inside the backend's save_dir"):
            backend.add_scalars({"a": 1}, file_path=f"{name}.json")
    backend.add_image("val/x", image)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert files == ["a/b/scalars.json", "a/b/vis_image/val/x_0.png"]


def test_a_run_with_a_hostile_experiment_name_writes_only_inside_its_folder(tmp_path):
    work_dir = tmp_path / "a" / "b" / "work"
    run(work_dir, experiment_name="../../../../escaped", train_cfg=dict(by_epoch=True, max_epochs=1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["work"]
