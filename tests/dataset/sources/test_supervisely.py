from __future__ import annotations

import numpy as np
import pytest

from slipstream.dataset import SuperviselyPersonsDataset
from slipstream.training import dataloaders

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for index in range(3):
        for kind, shape, values in (("images", (6, 8, 3), 256), ("masks", (6, 8), 2)):
            (tmp_path / kind).mkdir(exist_ok=True)
            pixels = rng.integers(values, size=shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / kind / f"{index}.png")
        rows.append(f"images/{index}.png,masks/{index}.png")
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n\n")
    return tmp_path


def test_samples_are_listed_in_the_order_of_the_table(folder):
    rows = (folder / "train.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\r\n".join(reversed(rows)))
    dataset = SuperviselyPersonsDataset(folder, "train.csv", cache_images=True)
    assert len(dataset) == 3
    for index, sample in zip((2, 1, 0), dataset, strict=True):
        image = np.asarray(Image.open(folder / f"images/{index}.png"))
        assert np.array_equal(sample["inputs"].numpy(), image.transpose(2, 0, 1))
        assert np.array_equal(
            sample["targets"].numpy(), np.asarray(Image.open(folder / f"masks/{index}.png"))
        )
    assert dataset.metainfo["classes"] == ("background", "person")
    assert dataset.samples_targets_tuples_list == [
        (str(folder / f"images/{index}.png"), str(folder / f"masks/{index}.png")) for index in (2, 1, 0)
    ]


def test_the_supergradients_loader_reads_the_folder(folder):
    (folder / "val.csv").write_text((folder / "train.csv").read_text())
    for split in ("train", "val"):
        loader = dataloaders.get(
            f"supervisely_persons_{split}", {"root_dir": str(folder), "transforms": []}, {"batch_size": 2}
        )
        assert next(iter(loader))["inputs"].shape == (2, 3, 6, 8)
        assert loader.drop_last is (split == "train")
