"""Write StreetScenes in the Cityscapes folder layout: `python -m slipstream.zoo.street_scenes.folder ROOT`."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from slipstream.dataset.sources.cityscapes_labels import CITYSCAPES_LABELS
from slipstream.extras import extra
from slipstream.zoo.street_scenes.dataset import StreetScenes

_CITIES = {"train": ("aachen", "bochum", "bremen"), "val": ("frankfurt", "lindau", "munster")}


def write_street_folder(
    root: str | Path, train: int = 8, val: int = 4, size: tuple[int, int] = (256, 512), seed: int = 0
) -> None:
    """Write street scenes in the Cityscapes folder layout: images, label-id masks, and a `lists` folder.

    `lists` contains the files that SuperGradients' recipes require: `train.lst`, `val.lst` and `labels.csv`.

    Args:
        root: output folder, created if necessary. Existing files are overwritten.
        train: number of training scenes. Scene i is identical to scene i of `StreetScenes` with the same seed.
        val: number of validation scenes, which are generated with the seed `seed + 1`.
        size: height and width in pixels.
        seed: random seed of the training scenes.

    Raises:
        ConfigError: if the size, the number of scenes or the seed is invalid.
    """
    with extra("images"):
        from PIL import Image

    splits = {"train": StreetScenes(size, train, seed), "val": StreetScenes(size, val, seed + 1)}
    root = Path(root)
    (root / "lists").mkdir(parents=True, exist_ok=True)
    _write_labels(root / "lists" / "labels.csv")
    label_ids = np.zeros(256, dtype=np.uint8)  # ids that are not evaluated become 'unlabeled'
    for label in CITYSCAPES_LABELS:
        if 0 <= label.train_id < 255:
            label_ids[label.train_id] = label.id
    for split, scenes in splits.items():
        lines = []
        for i in range(len(scenes)):
            city = _CITIES[split][i % 3]
            stem = f"{split}/{city}/{city}_{i // 3:06}_000019"
            names = (f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelIds.png")
            image, mask = scenes.load(i)
            for name, pixels in zip(names, (image, label_ids[mask]), strict=True):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / name, compress_level=3)
            lines.append(" ".join(names) + "\n")
        (root / "lists" / f"{split}.lst").write_text("".join(lines), encoding="utf-8")


def _write_labels(path: Path) -> None:
    columns = ["index", "name", "id", "trainId", "category", "catId", "hasInstances", "ignoreInEval", "color"]
    categories = list(dict.fromkeys(label.category for label in CITYSCAPES_LABELS))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for i, label in enumerate(CITYSCAPES_LABELS):
            category = (label.category, categories.index(label.category))
            flags = (label.has_instances, label.train_id in (-1, 255))
            color = "#{:02x}{:02x}{:02x}".format(*label.color)
            writer.writerow([i, label.name, label.id, label.train_id, *category, *flags, color])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", metavar="ROOT")
    parser.add_argument("--train", type=int, default=8, help="number of training scenes (default: 8)")
    parser.add_argument("--val", type=int, default=4, help="number of validation scenes (default: 4)")
    parser.add_argument("--size", default="256x512", help="height and width (default: 256x512)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    height, width = map(int, options.size.split("x"))
    write_street_folder(options.root, options.train, options.val, (height, width), options.seed)
