from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.dataset import ImageMaskFolder
from slipstream.errors import DataError

CLASSES = ["road", "tree", "car"]


def write(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(array, dtype=np.uint8))
    (image.convert(mode) if mode else image).save(path)


def make(root, names=("b", "a", "c"), size=(4, 6)):
    for i, name in enumerate(names):
        rng = np.random.default_rng(i)
        write(root / f"img/{name}.png", rng.integers(0, 256, (*size, 3)))
        write(root / f"ann/{name}.png", rng.integers(0, 3, size))
    return root


def folder(root, **kwargs):
    return ImageMaskFolder(
        **{"data_root": root, "images": "img", "masks": "ann", "classes": CLASSES} | kwargs
    )


def test_samples_match_the_files_in_the_order_of_their_names(tmp_path):
    dataset = folder(make(tmp_path))
    assert [p.stem for p in dataset.image_paths] == [p.stem for p in dataset.mask_paths] == ["a", "b", "c"]
    rng = np.random.default_rng(1)  # "a" was written second
    image, mask = rng.integers(0, 256, (4, 6, 3)), rng.integers(0, 3, (4, 6))
    np.testing.assert_array_equal(dataset[0]["inputs"].numpy(), image.transpose(2, 0, 1))
    np.testing.assert_array_equal(dataset[0]["targets"].numpy(), mask)
    assert dataset.metainfo["classes"] == ("road", "tree", "car")
    assert dataset.metainfo["ignore_index"] == 255
    assert len(dataset.metainfo["palette"]) == 3


def test_subfolders_and_suffixes_are_paired_as_in_cityscapes(tmp_path):
    for city, frame in (("bonn", 1), ("aachen", 1), ("aachen", 2)):
        write(tmp_path / f"img/{city}/{city}_{frame}_leftImg8bit.png", np.full((2, 2, 3), frame))
        write(tmp_path / f"ann/{city}/{city}_{frame}_gtFine_labelIds.png", np.full((2, 2), frame))
        write(tmp_path / f"ann/{city}/{city}_{frame}_gtFine_color.png", np.zeros((2, 2, 3)))
    dataset = folder(tmp_path, image_suffix="_leftImg8bit.png", mask_suffix="_gtFine_labelIds.png")
    assert [p.parent.name for p in dataset.image_paths] == ["aachen", "aachen", "bonn"]
    assert [int(sample["targets"][0, 0]) for sample in dataset] == [1, 2, 1]


def test_linked_folders_are_followed_once(tmp_path):
    make(tmp_path, names=["a", "city/b"])
    for kind in ("img", "ann"):
        (tmp_path / kind / "city").rename(tmp_path / f"{kind}_elsewhere")
        (tmp_path / kind / "city").symlink_to(tmp_path / f"{kind}_elsewhere")
        (tmp_path / f"{kind}_elsewhere/up").symlink_to(tmp_path / kind)
        (tmp_path / kind / "folder.png").mkdir()
    assert [p.stem for p in folder(tmp_path).image_paths] == ["a", "b"]


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P"])
def test_images_in_other_modes_become_rgb(tmp_path, mode):
    make(tmp_path, names=["a"])
    write(tmp_path / "img/a.png", np.full((4, 6, 3), 51), mode)  # the color 51 is in Pillow's default palette
    assert folder(tmp_path)[0]["inputs"].tolist() == torch.full((3, 4, 6), 51).tolist()


def test_label_map_changes_only_its_ids(tmp_path):
    make(tmp_path, names=["a"], size=(1, 4))
    write(tmp_path / "ann/a.png", [[0, 7, 8, 200]])
    dataset = folder(tmp_path, label_map={7: 1, 8: 2, 200: 255})
    assert dataset[0]["targets"].tolist() == [[0, 1, 2, 255]]
    assert dataset.get_cat_ids(0) == [0, 1, 2]


@pytest.mark.parametrize("ignore_index", [255, 3, None])
def test_invalid_id_error_names_the_id_and_its_file(tmp_path, ignore_index):
    make(tmp_path)
    write(tmp_path / "ann/b.png", [[0, 1, 2, 9, 9, 5]] * 4)
    dataset = folder(tmp_path, ignore_index=ignore_index)
    assert len([dataset[0], dataset[2]]) == 2
    with pytest.raises(DataError, match=r"ann/b\.png' has invalid label ids: 5 \(4 pixels\), 9 \(8 pix"):
        dataset[1]


def test_ignored_id_does_not_hide_an_invalid_one(tmp_path):
    make(tmp_path, names=["a"], size=(1, 3))
    write(tmp_path / "ann/a.png", [[255, 255, 4]])
    with pytest.raises(DataError, match=r"4 \(1 pixels\)"):
        folder(tmp_path)[0]


def test_error_lists_all_files_without_a_counterpart(tmp_path):
    make(tmp_path, names="abcd")
    (tmp_path / "ann/b.png").unlink()
    (tmp_path / "ann/d.png").unlink()
    (tmp_path / "img/c.png").unlink()
    with pytest.raises(DataError, match="3 files have no counterpart") as caught:
        folder(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split("/")[-1] for line in lines] == ["b.png'", "d.png'", "c.png'"]
    assert "mask without an image" in lines[2]


def test_size_mismatch_error_names_both_files(tmp_path):
    make(tmp_path)
    write(tmp_path / "ann/c.png", np.zeros((5, 6)))
    with pytest.raises(DataError, match=r"img/c\.png' is 6 x 4 pixels, but its mask '.*ann/c\.png' is 6 x 5"):
        folder(tmp_path)[2]


@pytest.mark.parametrize("kind", ["img", "ann"])
@pytest.mark.parametrize("spoil", [lambda d: b"", lambda d: d[: len(d) // 2], lambda d: b"text" + d])
def test_corrupt_file_error_names_the_file(tmp_path, kind, spoil):
    make(tmp_path)
    path = tmp_path / kind / "b.png"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=rf"cannot read '.*{kind}/b\.png'.*.*skip_errors"):
        folder(tmp_path)[1]


def test_cache_key_depends_on_files_and_the_meaning_of_ids(tmp_path):
    make(tmp_path)
    which, version = folder(tmp_path).cache_key(1)
    assert (which, version) == folder(tmp_path).cache_key(1)
    assert "img/b.png" in which
    assert "ann/b.png" in which
    assert folder(tmp_path).cache_key(0)[0] != which
    for other in ({"label_map": {7: 1}}, {"ignore_index": 3}, {"classes": [*CLASSES, "sky"]}):
        assert folder(tmp_path, **other).cache_key(1) == (which, folder(tmp_path, **other).cache_key(1)[1])
        assert folder(tmp_path, **other).cache_key(1)[1] != version
    for path in (tmp_path / "ann/b.png", tmp_path / "img/b.png"):
        before = folder(tmp_path).cache_key(1)[1]
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
        assert folder(tmp_path).cache_key(1)[1] != before


def test_disk_cache_is_used_until_the_file_changes(tmp_path):
    make(tmp_path / "data")
    first = folder(tmp_path / "data", cache=tmp_path / "cache")[0]
    assert list((tmp_path / "cache").rglob("*"))
    again = folder(tmp_path / "data", cache=tmp_path / "cache")[0]
    assert torch.equal(first["inputs"], again["inputs"])
    write(tmp_path / "data/img/a.png", np.full((4, 6, 3), 77))
    assert folder(tmp_path / "data", cache=tmp_path / "cache")[0]["inputs"].unique().tolist() == [77]
