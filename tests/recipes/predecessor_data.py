"""Tiny versions of the datasets that SuperGradients' recipes use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64
"""Side length of a square crop in pixels."""
CLASSES = 6
"""Number of classes in the ImageNet folder."""


def write_data(folder: Path) -> Path:
    """Write tiny versions of the recipes' datasets to `folder`, and return `folder`."""
    rng = np.random.default_rng(0)
    _write_cityscapes(folder / "cityscapes", rng)
    _write_supervisely(folder / "supervisely", rng)
    _write_coco(folder / "coco", rng)
    for split, count in (("train", 2), ("val", 1)):
        for name in (f"n0{index}" for index in range(CLASSES)):
            (folder / "imagenet" / split / name).mkdir(parents=True)
            for index in range(count):
                image = Image.fromarray(rng.integers(256, size=(80, 90, 3), dtype=np.uint8))
                image.save(folder / "imagenet" / split / name / f"{name}_{index}.JPEG")
    cifar = folder / "cifar10" / "cifar-10-batches-bin"
    cifar.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(256, size=(4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (cifar / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def _save(path: Path, rng: np.random.Generator, shape: tuple[int, ...], values: int = 256) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(values, size=shape, dtype=np.uint8)).save(path)


def _write_supervisely(root: Path, rng: np.random.Generator) -> None:
    for split in ("train", "val"):
        rows = [(f"images/{split}{index}.png", f"masks/{split}{index}.png") for index in range(4)]
        for image, mask in rows:
            _save(root / image, rng, (90, 70, 3))
            _save(root / mask, rng, (90, 70), 2)
        (root / f"{split}.csv").write_text("\n".join(map(",".join, rows)))


def _write_coco(root: Path, rng: np.random.Generator) -> None:
    for split in ("train2017", "val2017"):
        names = [f"{index:012}.jpg" for index in range(4)]
        for name in names:
            _save(root / "images" / split / name, rng, (75, 100, 3))
        content = {
            "images": [
                {"id": index, "file_name": name, "height": 75, "width": 100}
                for index, name in enumerate(names)
            ],
            "annotations": [
                {"image_id": index, "category_id": category, "segmentation": [[5, 5, 90, 9, 60, 70, 8, 60]]}
                for index in range(4)
                for category in (1, 3)
            ],
            "categories": [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}],
        }
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/instances_{split}.json").write_text(json.dumps(content))


def _write_cityscapes(root: Path, rng: np.random.Generator) -> None:
    lists: dict[str, list[str]] = {"train": [], "auto_labelling": [], "val": []}
    (root / "lists").mkdir(parents=True)
    for split, lines in lists.items():
        for index in range(4):
            image, mask = f"images/{split}_{index}.png", f"masks/{split}_{index}_gtFine_labelIds.png"
            for file, shape in ((image, (SIDE, 2 * SIDE, 3)), (mask, (SIDE, 2 * SIDE))):
                (root / file).parent.mkdir(exist_ok=True)
                Image.fromarray(rng.integers(34, size=shape, dtype=np.uint8)).save(root / file)
            lines.append(f"{image} {mask}")
        (root / "lists" / f"{split}.lst").write_text("\n".join(lines))
    rows = [f"class{i},{i},{i % 20 if i % 20 < 19 else 255}" for i in range(34)]
    (root / "lists" / "labels.csv").write_text("\n".join(["name,id,trainId", *rows]))
