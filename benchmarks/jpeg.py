"""Measure the CPU time to decode JPEG files to RGB arrays in one thread, and compare the pixels with Pillow's.

python benchmarks/jpeg.py --rounds 7 --folder data/camvid/train --out benchmarks/results/jpeg.md

Each contender reads every file from the page cache and decodes it to a uint8 array of shape (H, W, 3). The contenders
take turns within each round, in one process with one thread. The files contain generated street scenes (2048 x 1024);
`--folder` adds the first 64 JPEG files of a folder, such as photos. Times are CPU time, so other programs on the
machine affect the result only through shared caches and hyper-threads.

- Pillow without and with `Image.draft`. At full size, `draft` has no effect on RGB files.
- simplejpeg, imagecodecs, PyTurboJPEG, OpenCV and pyvips, called directly, with the settings that preserve all detail.
- Slipstream: `read_image`, which also applies the EXIF orientation and reports damaged files with Pillow's errors; with
  and without `slipstream[jpeg]`.

Contenders that are not installed are skipped. PyTurboJPEG also requires a C library that its package does not contain.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from report import environment_info, table, write_result
from slipstream.dataset.sources import decode
from slipstream.zoo.street_scenes import StreetScenes

PACKAGES = ["pillow", "simplejpeg", "imagecodecs", "PyTurboJPEG", "opencv-python-headless", "pyvips", "numpy"]
Decoder = Callable[[Path], np.ndarray[Any, Any]]


def pillow(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def pillow_draft(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        image.draft("RGB", image.size)
        return np.asarray(image)


def simplejpeg_decoder() -> Decoder:
    from simplejpeg import decode_jpeg

    return lambda path: decode_jpeg(path.read_bytes(), "RGB", strict=True)


def imagecodecs_decoder() -> Decoder:
    from imagecodecs import jpeg8_decode

    return lambda path: jpeg8_decode(path.read_bytes(), outcolorspace="RGB")


def pyturbojpeg_decoder() -> Decoder:
    from turbojpeg import TJPF_RGB, TurboJPEG

    decoder = TurboJPEG()
    return lambda path: decoder.decode(path.read_bytes(), pixel_format=TJPF_RGB)


def opencv_decoder() -> Decoder:
    import cv2

    cv2.setNumThreads(0)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return lambda path: cv2.imdecode(np.fromfile(path, np.uint8), flags)


def pyvips_decoder() -> Decoder:
    import pyvips

    pyvips.cache_set_max(0)
    pyvips.concurrency_set(1)
    return lambda path: pyvips.Image.new_from_file(str(path), access="sequential", fail_on="warning").numpy()


def slipstream_with_pillow(path: Path) -> np.ndarray[Any, Any]:
    with mock.patch.object(decode, "_fast_formats", return_value={}):
        return decode.read_image(path)


def slipstream_with_simplejpeg() -> Decoder:
    import simplejpeg  # noqa: F401  (skip this contender if it is not installed)

    return decode.read_image


CONTENDERS: dict[str, Callable[[], Decoder]] = {
    "Pillow": lambda: pillow,
    "Pillow, draft": lambda: pillow_draft,
    "simplejpeg": simplejpeg_decoder,
    "imagecodecs": imagecodecs_decoder,
    "PyTurboJPEG": pyturbojpeg_decoder,
    "OpenCV": opencv_decoder,
    "pyvips": pyvips_decoder,
    "slipstream": lambda: slipstream_with_pillow,
    "slipstream, jpeg extra": slipstream_with_simplejpeg,
}


def installed_decoders() -> dict[str, Decoder]:
    """Return the contenders that can be used on this machine."""
    decoders = {}
    for name, build in CONTENDERS.items():
        try:
            decoders[name] = build()
        except (
            ImportError,
            OSError,
            RuntimeError,
        ) as error:  # a package, or the library that it loads, is missing
            print(f"skipping {name}: {type(error).__name__}")
    return decoders


@contextmanager
def file_sets(folder: Path | None, count: int) -> Iterator[dict[str, list[Path]]]:
    """Yield the files of each case: generated 2048 x 1024 images, and the files of `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        sets: dict[str, list[Path]] = {}
        scenes = StreetScenes(size=(1024, 2048), length=count)
        images = [Image.fromarray(scenes.load(index)[0]) for index in range(count)]
        for subsampling, progressive in product(("4:2:0", "4:4:4"), (False, True)):
            name = f"2048 x 1024, {subsampling}, {'progressive' if progressive else 'baseline'}"
            sets[name] = [Path(temporary) / f"{subsampling[2:]}{progressive}{i}.jpg" for i in range(count)]
            for path, image in zip(sets[name], images, strict=True):
                image.save(path, quality=90, subsampling=subsampling, progressive=progressive)
        if folder is not None:
            photos = sorted(folder.glob("*.jpg"))[:64]
            with Image.open(photos[0]) as image:
                sets[f"photos, {image.width} x {image.height}"] = photos
        yield sets


def measure(decoders: dict[str, Decoder], files: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Return the milliseconds per file in each round, and the number of files whose pixels equal Pillow's."""
    equal = {
        name: sum(np.array_equal(get(path), pillow(path)) for path in files) for name, get in decoders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, get in decoders.items():
            start = process_time()
            for path in files:
                get(path)
            times[name].append((process_time() - start) / len(files) * 1000)
    return {"files": len(files), "equal": equal, "milliseconds": times}


def summary(cases: dict[str, dict[str, Any]]) -> str:
    """Return a table of median times and of median per-round speeds relative to Pillow."""
    rows = []
    for case, case_result in cases.items():
        base = case_result["milliseconds"]["Pillow"]
        for name, times in case_result["milliseconds"].items():
            speed = median(a / b for a, b in zip(base, times, strict=True))
            same = f"{case_result['equal'][name]} of {case_result['files']}"
            rows.append([f"{case}: {name}", f"{median(times):.2f}", f"{speed:.2f}", same])
    return table(["", "ms per file", "speed relative to Pillow", "files with equal pixels"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of measurements of each contender")
    parser.add_argument("--images", type=int, default=2, help="number of large images to generate")
    parser.add_argument("--folder", type=Path, help="folder with JPEG files (*.jpg) to decode as well")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    info, decoders = environment_info(PACKAGES), installed_decoders()
    with file_sets(args.folder, args.images) as sets:
        cases = {name: measure(decoders, files, args.rounds) for name, files in sets.items()}
    text = summary(cases)
    print(text)
    if args.out:
        title = "CPU time to decode a JPEG file, in milliseconds"
        write_result(args.out, title, info, text, {"cases": cases})


if __name__ == "__main__":
    main()
