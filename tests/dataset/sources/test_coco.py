"""Test that COCO masks match those of the COCO API and that images are selected as in SuperGradients."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slipstream.dataset import CoCoSegmentationDataSet
from slipstream.training import dataloaders

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("pycocotools")

HEIGHT, WIDTH = 60, 50


def rectangle(left, top, right, bottom):
    return [left, top, right, top, right, bottom, left, bottom]


def annotation(image, category, segmentation):
    return {"image_id": image, "category_id": category, "segmentation": segmentation, "iscrowd": 0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a dataset's folder. Image 7 has a person, a car and a chair, 8 has a crowd, and 9 has only a small car."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    crowd = {"counts": [HEIGHT * 10, HEIGHT * 25, HEIGHT * 15], "size": [HEIGHT, WIDTH]}
    content = {
        "images": [
            {"id": number, "file_name": f"{number}.jpg", "height": HEIGHT, "width": WIDTH}
            for number in (7, 9, 8)
        ],
        "annotations": [
            annotation(7, 1, [rectangle(0, 0, 30, 40), rectangle(30, 0, 40, 10)]),
            annotation(7, 3, [rectangle(20, 30, 50, 60)]),
            annotation(8, 1, crowd),
            annotation(9, 3, [rectangle(0, 0, 10, 10)]),
            annotation(7, 62, [rectangle(40, 0, 50, 10)]),
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}, {"id": 62, "name": "chair"}],
    }
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances.json").write_text(json.dumps(content))
    (tmp_path / "images").mkdir()
    for number in (7, 8, 9):
        Image.new("RGB", (WIDTH, HEIGHT), (number, 0, 0)).save(tmp_path / f"images/{number}.jpg", quality=100)
    return tmp_path


def make(folder, classes=((0, "background"), (3, "car"), (1, "person")), **arguments):
    return CoCoSegmentationDataSet(folder, "instances.json", "images", "annotations", classes, **arguments)


def test_masks_show_the_listed_classes_and_the_first_of_overlapping_instances(folder):
    dataset = make(folder)
    assert dataset.metainfo["classes"] == ("background", "car", "person")
    assert len(dataset) == 2  # image 9 has only 100 labeled pixels
    wanted = np.zeros((HEIGHT, WIDTH), np.uint8)
    wanted[30:60, 20:50] = 1
    wanted[0:40, 0:30] = wanted[0:10, 30:40] = 2
    assert np.array_equal(dataset[0]["targets"].numpy(), wanted)
    crowd = np.zeros((HEIGHT, WIDTH), np.uint8)
    crowd[:, 10:35] = 2
    assert np.array_equal(dataset[1]["targets"].numpy(), crowd)
    assert dataset[1]["inputs"].float().mean((1, 2)).round().tolist() == [8, 0, 0]
    assert dataset.get_cat_ids(0) == [0, 1, 2]
    paths_and_images = [(str(folder / f"images/{number}.jpg"), (number, HEIGHT, WIDTH)) for number in (7, 8)]
    assert dataset.samples_targets_tuples_list == paths_and_images


def test_all_categories_have_their_ids_by_default(folder):
    dataset = make(folder, None)
    assert dataset.metainfo["classes"][:4] == ("background", "person", "unused 2", "car")
    assert len(dataset.metainfo["classes"]) == 63
    assert dataset.get_cat_ids(0) == [0, 1, 3, 62]


def test_the_image_selection_is_cached_for_each_list_of_classes(folder, capsys):
    for classes, count in ((None, 1), (None, 0), ("voc", 1)):
        assert len(make(folder, classes)) == 2
        assert capsys.readouterr().err.count("reading the masks of 3 images") == count
    make(folder)
    for file in (folder / "cache/coco").iterdir():
        file.write_text("damaged")
    assert len(make(folder)) == 2


def test_decoded_samples_are_cached_on_disk(folder):
    first = make(folder, cache=folder / "decoded")
    samples = [first[index]["targets"].clone() for index in range(2)]
    assert len(list((folder / "decoded").rglob("*.decoded"))) == 2
    again = make(folder, cache=folder / "decoded")
    assert all(again[index]["targets"].equal(sample) for index, sample in enumerate(samples))
    assert make(folder, None).cache_key(0)[1] != again.cache_key(0)[1]


def test_images_with_the_same_file_have_separate_cache_entries(folder):
    path = folder / "annotations/instances.json"
    content = json.loads(path.read_text())
    for image in content["images"]:
        image["file_name"] = "7.jpg"
    path.write_text(json.dumps(content))
    for _ in range(2):  # the second pass reads the cache
        dataset = make(folder, cache=folder / "decoded")
        assert [dataset[index]["targets"].unique().tolist() for index in range(2)] == [[0, 1, 2], [0, 2]]


def test_the_supergradients_loader_uses_the_pascal_voc_classes(folder):
    own = dict(
        root_dir=str(folder), list_file="instances.json", samples_sub_directory="images", transforms=[]
    )
    for split in ("train", "val"):
        loader = dataloaders.get(f"coco_segmentation_{split}", own, {"batch_size": 2, "num_workers": 0})
        assert len(loader.dataset.metainfo["classes"]) == 21
        assert set(next(iter(loader))["targets"].unique().tolist()) == {0, 7, 9, 15}  # car, chair, person
