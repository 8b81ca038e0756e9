from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from slipstream.dataset import CityscapesDataset
from slipstream.errors import ConfigError
from slipstream.zoo.street_scenes import StreetScenes
from slipstream.zoo.street_scenes import folder as street_folder
from slipstream.zoo.street_scenes.folder import write_street_folder

SIZE = (32, 64)


def digests(root):
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def by_place(dataset):
    return {path.name: sample for path, sample in zip(dataset.image_paths, dataset, strict=True)}


def test_folder_contains_the_scenes_in_the_cityscapes_layout(tmp_path):
    write_street_folder(tmp_path, train=5, val=2, size=SIZE, seed=3)
    for split, count, seed in (("train", 5, 3), ("val", 2, 4)):
        scenes = StreetScenes(SIZE, count, seed)
        listed = CityscapesDataset(
            tmp_path, list_file=f"lists/{split}.lst", labels_csv_path="lists/labels.csv", ignore_label=255
        )
        assert len(listed) == count
        for ours, scene in zip(listed, scenes, strict=True):
            assert torch.equal(ours["inputs"], scene["inputs"])
            assert torch.equal(ours["targets"], scene["targets"])
        found = by_place(CityscapesDataset(tmp_path, split=split, ignore_label=255))
        assert found.keys() == by_place(listed).keys()
        assert all(torch.equal(found[k]["targets"], v["targets"]) for k, v in by_place(listed).items())
    assert len({p.name for p in (tmp_path / "leftImg8bit/train").iterdir()}) == 3
    assert (tmp_path / "gtFine/train/aachen/aachen_000001_000019_gtFine_labelIds.png").is_file()


def test_label_table_has_the_supergradients_format(tmp_path):
    write_street_folder(tmp_path, train=1, val=1, size=SIZE)
    table = np.genfromtxt(
        tmp_path / "lists/labels.csv",
        delimiter=",",
        names=True,
        dtype="<i8,U20,<i8,<i8,U12,<i8,?,?,U7",
        comments="&",
        encoding="utf-8",
        case_sensitive="lower",
    )
    assert table["id"].tolist() == [*range(34), -1]
    scored = table[~table["ignoreineval"]]
    assert scored["trainid"].tolist() == list(range(19))
    assert scored["name"].tolist() == list(StreetScenes(SIZE, 1).metainfo["classes"])
    assert [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in scored["color"]] == StreetScenes(
        SIZE, 1
    ).metainfo["palette"]


def test_several_processes_write_the_same_files_as_one(tmp_path, monkeypatch):
    write_street_folder(tmp_path / "one", train=3, val=2, size=SIZE)
    monkeypatch.setattr(street_folder, "_MIN_SCENES_PER_PROCESS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    write_street_folder(tmp_path / "two", train=3, val=2, size=SIZE)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_command_writes_the_same_folder(tmp_path):
    write_street_folder(tmp_path / "python", train=2, val=1, size=SIZE)
    words = [str(tmp_path / "command"), "--train", "2", "--val", "1", "--size", "32x64"]
    command = [sys.executable, "-m", "slipstream.zoo.street_scenes.folder", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "2 training and 1 validation scenes" in line
    assert f"slipstream train cityscapes_regseg48 data_root_dir={tmp_path / 'command'}" in line
    assert digests(tmp_path / "python") == digests(tmp_path / "command")


def test_wrong_size_raises_a_one_line_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["street_folder", str(tmp_path / "a"), "--size", "32"])
    with pytest.raises(SystemExit):
        street_folder._main()
    assert "HEIGHTxWIDTH" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["street_folder", str(tmp_path / "b"), "--size", "8x64"])
    assert street_folder._main() == 1
    assert capsys.readouterr().err.startswith(
        "error: size: a street scene must have between 32 and 16384 pixels"
    )
    assert not (tmp_path / "b").exists()


def test_folder_without_scenes_raises_error(tmp_path):
    with pytest.raises(ConfigError, match="length of StreetScenes must be at least 1"):
        write_street_folder(tmp_path / "none", val=0)
    assert not (tmp_path / "none").exists()
