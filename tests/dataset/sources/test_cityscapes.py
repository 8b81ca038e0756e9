from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.dataset import CityscapesDataset
from slipstream.dataset.sources.cityscapes_labels import CITYSCAPES_CLASSES
from slipstream.errors import DataError

# Reference table from the Cityscapes benchmark: the ids of the scored labels, in the order of their train ids.
SCORED = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
FRAMES = [("train", "bonn", 2), ("train", "aachen", 1), ("val", "ulm", 1)]
LABEL_IDS = np.arange(34, dtype=np.uint8).reshape(2, 17)


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array, dtype=np.uint8)).save(path)


def frame_path(split, city, frame):
    return f"{split}/{city}/{city}_{frame:06}_000019"


def image_path(root, *frame):
    return root / f"leftImg8bit/{frame_path(*frame)}_leftImg8bit.png"


def mask_path(root, *frame, kind="labelIds"):
    return root / f"gtFine/{frame_path(*frame)}_gtFine_{kind}.png"


def make(root, mask=LABEL_IDS):
    for number, frame in enumerate(FRAMES):
        rng = np.random.default_rng(number)
        write(image_path(root, *frame), rng.integers(0, 256, (*np.shape(mask), 3)))
        write(mask_path(root, *frame), mask)
        write(mask_path(root, *frame, kind="color"), np.zeros((*np.shape(mask), 3)))
    return root


def make_list(root, frames=FRAMES, kind="labelIds"):
    lines = [
        f"leftImg8bit/{frame_path(*f)}_leftImg8bit.png gtFine/{frame_path(*f)}_gtFine_{kind}.png\n"
        for f in frames
    ]
    (root / "lists").mkdir(exist_ok=True)
    (root / "lists/some.lst").write_text("".join(lines))
    return "lists/some.lst"


def expected(ignore=19):
    return [SCORED.index(i) if i in SCORED else ignore for i in range(34)]


def test_split_is_sorted_by_path_and_maps_to_train_ids(tmp_path):
    dataset = CityscapesDataset(make(tmp_path), split="train")
    assert [p.parent.name for p in dataset.image_paths] == ["aachen", "bonn"]
    pixels = np.random.default_rng(1).integers(0, 256, (2, 17, 3))  # "aachen" was written second
    assert torch.equal(dataset[0]["inputs"], torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.uint8)))
    assert dataset[0]["targets"].flatten().tolist() == expected()
    assert dataset.metainfo["classes"] == CITYSCAPES_CLASSES
    assert len(dataset.metainfo["palette"]) == 19
    assert dataset.metainfo["ignore_index"] == 19
    assert dataset.get_cat_ids(0) == list(range(19))
    assert len(CityscapesDataset(tmp_path, split="val")) == 1


def test_train_ids_are_used_if_every_photograph_has_them(tmp_path):
    make(tmp_path)
    train_ids = np.array([[0, 18, 255, 19, 5] + [3] * 12] * 2)
    write(mask_path(tmp_path, *FRAMES[0], kind="labelTrainIds"), train_ids)
    half = CityscapesDataset(tmp_path, split="train")
    assert {p.name.rsplit("_", 1)[1] for p in half.mask_paths} == {"labelIds.png"}
    write(mask_path(tmp_path, *FRAMES[1], kind="labelTrainIds"), train_ids)
    whole = CityscapesDataset(tmp_path, split="train")
    assert {p.name.rsplit("_", 1)[1] for p in whole.mask_paths} == {"labelTrainIds.png"}
    assert whole[0]["targets"][0, :5].tolist() == [0, 18, 19, 19, 5]


def test_list_file_determines_pairs_and_order(tmp_path):
    list_file = make_list(make(tmp_path))
    dataset = CityscapesDataset(tmp_path, list_file=list_file)
    assert [p.parent.name for p in dataset.image_paths] == ["bonn", "aachen", "ulm"]
    assert dataset[2]["targets"].flatten().tolist() == expected()


def test_train_ids_in_a_list_file_are_not_mapped_again(tmp_path):
    make(tmp_path)
    for frame in FRAMES:
        write(mask_path(tmp_path, *frame, kind="labelTrainIds"), np.full((2, 17), 7))
    dataset = CityscapesDataset(tmp_path, list_file=make_list(tmp_path, kind="labelTrainIds"))
    assert dataset[0]["targets"].unique().tolist() == [7]


@pytest.mark.parametrize(
    "table",
    [
        "index,name,id,trainId,color\n0,void,0,255,#000000\n1,road,7,4,#804080\n2,plate,-1,-1,#00008e\n",
        "\ufeffID , trainID\n0,255\n7,4\n-1,-1\n",
        "name,trainid\n" + "void,255\n" * 7 + "road,4\n",  # without an id column, the row number is the id
    ],
)
def test_labels_csv_maps_label_ids(tmp_path, table):
    make(tmp_path, [[0, 7, 255]])
    (tmp_path / "labels.csv").write_text(table, encoding="utf-8")
    dataset = CityscapesDataset(tmp_path, split="val", labels_csv_path="labels.csv")
    assert dataset[0]["targets"].tolist() == [[19, 4, 19]]


def test_unknown_label_id_error_names_its_file(tmp_path):
    make(tmp_path)
    write(mask_path(tmp_path, *FRAMES[0]), np.where(LABEL_IDS < 3, 40, LABEL_IDS))
    dataset = CityscapesDataset(tmp_path, split="train")
    with pytest.raises(DataError, match=r"bonn.*labelIds\.png' has invalid label ids: 40 \(3 pixels\)"):
        dataset[1]


@pytest.mark.parametrize(("labels", "images"), [(True, False), (False, True), (True, True), (False, False)])
def test_cached_files_are_read_once(tmp_path, labels, images):
    make(tmp_path)
    dataset = CityscapesDataset(tmp_path, split="val", cache_labels=labels, cache_images=images)
    first = dataset[0]
    write(image_path(tmp_path, *FRAMES[2]), np.full((2, 17, 3), 9))
    write(mask_path(tmp_path, *FRAMES[2]), np.full((2, 17), 7))
    again = dataset[0]
    assert torch.equal(first["inputs"], again["inputs"]) == images
    assert torch.equal(first["targets"], again["targets"]) == labels


def test_disk_cache_depends_on_the_meaning_of_ids(tmp_path):
    make(tmp_path / "data")
    cache = tmp_path / "cache"
    assert CityscapesDataset(tmp_path / "data", split="val", cache=cache)[0]["targets"].max() == 19
    assert (
        CityscapesDataset(tmp_path / "data", split="val", cache=cache, ignore_label=99)[0]["targets"].max()
        == 99
    )
