"""Write StreetScenes in the Cityscapes folder layout: `python -m slipstream.zoo.street_scenes.folder ROOT`."""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipstream.cores import cores
from slipstream.dataset.sources.cityscapes_labels import CITYSCAPES_LABELS
from slipstream.errors import SlipstreamError
from slipstream.extras import extra
from slipstream.zoo.street_scenes.dataset import StreetScenes

__all__ = ["write_street_folder"]

_CITIES = {"train": ("aachen", "bochum", "bremen"), "val": ("frankfurt", "lindau", "munster")}
_MIN_SCENES_PER_PROCESS = 16


class _Part(NamedTuple):
    """The scenes that one process writes: every `step`-th scene of a split, starting at `first`."""

    root: Path
    split: str
    scenes: StreetScenes
    first: int
    step: int


def write_street_folder(
    root: str | Path, train: int = 8, val: int = 4, size: tuple[int, int] = (256, 512), seed: int = 0
) -> None:
    """Write street scenes in the Cityscapes folder layout: images, label-id masks, and a `lists` folder.

    `lists` contains the files that SuperGradients' recipes require: `train.lst`, `val.lst` and `labels.csv`. Large
    folders are written by several processes, so the calling script requires an `if __name__ == "__main__":` guard.

    Args:
        root: output folder, created if necessary. Existing files are overwritten.
        train: number of training scenes. Scene i is identical to scene i of `StreetScenes` with the same seed.
        val: number of validation scenes, which are generated with the seed `seed + 1`.
        size: height and width in pixels.
        seed: random seed of the training scenes.

    Raises:
        ConfigError: if the size, the number of scenes or the seed is invalid.
    """
    root = Path(root)
    counts = {"train": train, "val": val}
    scenes = {split: StreetScenes(size, counts[split], seed + (split == "val")) for split in counts}
    (root / "lists").mkdir(parents=True, exist_ok=True)
    _write_labels(root / "lists" / "labels.csv")
    for split, count in counts.items():
        lines = [" ".join(_names(split, i)) for i in range(count)]
        (root / "lists" / f"{split}.lst").write_text("\n".join(lines) + "\n", encoding="utf-8")
    workers = max(1, min(cores(), (train + val) // _MIN_SCENES_PER_PROCESS))
    parts = [
        _Part(root, split, scenes[split], first, workers) for split in counts for first in range(workers)
    ]
    if workers == 1:
        for part in parts:
            _write_part(part)
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_write_part, parts))


def _names(split: str, index: int) -> tuple[str, str]:
    """Return the paths of an image and its mask, relative to the root."""
    cities = _CITIES[split]
    city = cities[index % len(cities)]
    stem = f"{split}/{city}/{city}_{index // len(cities):06}_000019"
    return f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelIds.png"


def _write_part(part: _Part) -> None:
    with extra("images"):
        from PIL import Image

    label_ids = np.zeros(256, dtype=np.uint8)  # ids that are not evaluated become 'unlabeled'
    for label in CITYSCAPES_LABELS:
        if 0 <= label.train_id < 255:
            label_ids[label.train_id] = label.id
    for i in range(part.first, len(part.scenes), part.step):
        image, mask = part.scenes.load(i)
        for name, pixels in zip(_names(part.split, i), (image, label_ids.take(mask)), strict=True):
            path = part.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # With level 6, the default, saving takes twice as long as drawing the scene, and files are only 8% smaller.
            Image.fromarray(pixels).save(path, compress_level=3)


def _write_labels(path: Path) -> None:
    columns = ["index", "name", "id", "trainId", "category", "catId", "hasInstances", "ignoreInEval", "color"]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *_label_rows()])


def _label_rows() -> Iterator[list[str]]:
    categories = list(dict.fromkeys(label.category for label in CITYSCAPES_LABELS))
    for row, label in enumerate(CITYSCAPES_LABELS):
        ignored = label.train_id in (-1, 255)
        numbers = (label.id, label.train_id, label.category, categories.index(label.category))
        flags, color = (label.has_instances, ignored), "#{:02x}{:02x}{:02x}".format(*label.color)
        yield [str(row), label.name, *map(str, numbers), *map(str, flags), color]


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH, such as 256x512, not {text!r}")
    return int(match[1]), int(match[2])


def _main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.zoo.street_scenes.folder", description=__doc__
    )
    parser.add_argument("root", type=Path, metavar="ROOT")
    parser.add_argument(
        "--train", type=int, default=8, metavar="N", help="number of training scenes (default: 8)"
    )
    parser.add_argument(
        "--val", type=int, default=4, metavar="N", help="number of validation scenes (default: 4)"
    )
    parser.add_argument(
        "--size", type=_size, default=(256, 512), metavar="HxW", help="image size (default: 256x512)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    options = parser.parse_args()
    try:
        write_street_folder(**vars(options))
    except (SlipstreamError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    overrides = f"data_root_dir={shlex.quote(str(options.root))} num_gpus=1 batch_size=2 epochs=1"
    print(
        f"{options.root}: {options.train} training and {options.val} validation scenes in the Cityscapes layout; "
        f"to train on them, run: slipstream train cityscapes_regseg48 {overrides}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(_main())
