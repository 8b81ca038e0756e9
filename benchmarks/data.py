"""Measure the data loading speed on one core, in images per second.

python benchmarks/data.py --rounds 5 --out benchmarks/results/data.md

All contenders produce batches of eight 768 x 768 crops from pairs of 2048 x 1024 PNG files, with the transforms of the
cityscapes_pplite_seg75 recipe. They take turns, each in a separate process with one thread:

- PIL: each transform runs on the whole image with Pillow, as was typical of training code around 2020.
- albumentations: the same transforms with albumentations on OpenCV, which resizes without antialiasing.
- slipstream: only the required crop is resized, once; color transforms and normalization then run on the batch. PNGs
  are decoded by Pillow or imagecodecs, or read from the decode cache.

Slipstream runs color transforms and normalization on the training device. It is measured twice: once with only the work
of a data loader worker (`worker`), and once with the device transforms on the same core (`all`), as on a machine
without an accelerator. The other contenders have no device transforms. Contenders that are not installed are skipped.

Speeds are per second of CPU time, so other programs on the machine affect the result only through shared caches and
hyper-threads. `time waiting` is the fraction of wall time during which the process did not run, mainly because other
programs used the core. All files are in the page cache, and the decode cache's checksums have already been verified.
`added MB` is the increase in the process's private memory during the batches.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.utils.data import default_collate

from report import environment_info, table, write_result
from slipstream.dataset import SampleIndex
from slipstream.dataset.sources import decode
from slipstream.dataset.sources.cityscapes import CityscapesDataset
from slipstream.dataset.transforms.device_transforms import apply_device_transforms
from slipstream.zoo.street_scenes.folder import write_street_folder

CROP, SCALES, JITTER, IGNORE_INDEX, BATCH = 768, (0.25, 1.75), 0.5, 19, 8
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TRANSFORMS = [
    {"type": "SegColorJitter", "brightness": JITTER, "contrast": JITTER, "saturation": JITTER},
    {"type": "SegRandomFlip", "prob": 0.5},
    {"type": "SegRandomRescale", "scales": list(SCALES)},
    {"type": "SegPadShortToCropSize", "crop_size": [CROP, CROP], "fill_mask": IGNORE_INDEX},
    {"type": "SegCropImageAndMask", "crop_size": [CROP, CROP], "mode": "random"},
    {"type": "SegStandardize", "max_value": 255},
    {"type": "SegNormalize", "mean": MEAN, "std": STD},
    {"type": "SegConvertToTensor"},
]
Pipeline = Callable[[int, int], Any]
"""Function that returns the sample for an index and an epoch."""


def pil(root: Path) -> Pipeline:
    """Return a pipeline that applies one transform after another with Pillow."""
    data = CityscapesDataset(root, split="train", ignore_label=IGNORE_INDEX)
    table = label_table()

    def get(index: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng((epoch, index))
        image = Image.open(data.image_paths[index]).convert("RGB")
        mask = Image.fromarray(table[np.asarray(Image.open(data.mask_paths[index]))])
        enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
        for i in rng.permutation(3):
            image = enhancers[i](image).enhance(rng.uniform(1 - JITTER, 1 + JITTER))
        if rng.random() < 0.5:
            image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
        scale = rng.uniform(*SCALES)
        size = (int(image.width * scale), int(image.height * scale))
        image = image.resize(size, Image.Resampling.BILINEAR)
        mask = mask.resize(size, Image.Resampling.NEAREST)
        right, down = max(0, CROP - size[0]), max(0, CROP - size[1])
        if right or down:
            border = ((right + 1) // 2, (down + 1) // 2, right // 2, down // 2)
            image, mask = ImageOps.expand(image, border, 0), ImageOps.expand(mask, border, IGNORE_INDEX)
        left = int(rng.integers(image.width - CROP + 1))
        top = int(rng.integers(image.height - CROP + 1))
        box = (left, top, left + CROP, top + CROP)
        pixels = torch.from_numpy(np.array(image.crop(box))).permute(2, 0, 1).float().div_(255)
        pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))
        return pixels, torch.from_numpy(np.array(mask.crop(box))).long()

    return get


def albumentations(root: Path) -> Pipeline:
    """Return a pipeline that uses albumentations with OpenCV."""
    import albumentations as A
    import cv2
    from albumentations.pytorch import ToTensorV2

    cv2.setNumThreads(0)
    data = CityscapesDataset(root, split="train", ignore_label=IGNORE_INDEX)
    table = label_table()
    jitter_range = (1 - JITTER, 1 + JITTER)
    compose = A.Compose(
        [
            A.ColorJitter(
                brightness=jitter_range, contrast=jitter_range, saturation=jitter_range, hue=(0, 0), p=1
            ),
            A.HorizontalFlip(p=0.5),
            A.RandomScale((SCALES[0] - 1, SCALES[1] - 1), interpolation=cv2.INTER_LINEAR, p=1),
            A.PadIfNeeded(CROP, CROP, border_mode=cv2.BORDER_CONSTANT, fill=0, fill_mask=IGNORE_INDEX),
            A.RandomCrop(CROP, CROP),
            A.Normalize(MEAN, STD),
            ToTensorV2(),
        ],
        seed=0,
    )

    def get(index: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = cv2.cvtColor(cv2.imread(str(data.image_paths[index])), cv2.COLOR_BGR2RGB)
        mask = cv2.LUT(cv2.imread(str(data.mask_paths[index]), cv2.IMREAD_UNCHANGED), table)
        out = compose(image=image, mask=mask)
        return out["image"], out["mask"].long()

    return get


def slipstream(root: Path, cache: Path | None = None) -> Pipeline:
    """Return the part of Slipstream's pipeline that runs in a data loader worker."""
    data = CityscapesDataset(
        root, split="train", ignore_label=IGNORE_INDEX, transforms=TRANSFORMS, cache=cache
    )
    return lambda index, epoch: data[SampleIndex(index, seed=0, epoch=epoch)]


def slipstream_with_pillow(root: Path) -> Pipeline:
    """Return the part of Slipstream's pipeline that runs in a worker, with Pillow as the decoder."""
    decode._fast_formats = dict
    return slipstream(root)


def slipstream_with_imagecodecs(root: Path) -> Pipeline:
    """Return the part of Slipstream's pipeline that runs in a worker, with imagecodecs as the PNG decoder."""
    import imagecodecs  # noqa: F401  (skip this contender if it is not installed)

    return slipstream(root)


def slipstream_cached(root: Path) -> Pipeline:
    """Return the part of Slipstream's pipeline that runs in a worker, with a filled and verified cache."""
    get = slipstream(root, root / "cache")
    for index in [*range(image_count(root))] * 2:
        get(index, 0)
    return get


CONTENDERS: dict[str, Callable[[Path], Pipeline]] = {
    "PIL": pil,
    "albumentations": albumentations,
    "slipstream, Pillow": slipstream_with_pillow,
    "slipstream, imagecodecs": slipstream_with_imagecodecs,
    "slipstream, cached": slipstream_cached,
}
WITHOUT_DEVICE_TRANSFORMS = ("PIL", "albumentations")


def image_count(root: Path) -> int:
    return len(list(root.glob("leftImg8bit/train/*/*.png")))


def label_table() -> np.ndarray[Any, Any]:
    """Return the train id of each Cityscapes label id."""
    names = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
    table = np.full(256, IGNORE_INDEX, np.uint8)
    table[list(names)] = np.arange(len(names))
    return table


def measure(name: str, root: Path, epoch: int, batches: int) -> dict[str, float]:
    """Return the CPU seconds per image (worker and all), the fraction of time spent waiting, and the memory in MB."""
    torch.set_num_threads(1)
    images, get = image_count(root), CONTENDERS[name](root)
    before, worker, rest = private_mb(), 0.0, 0.0
    for batch in range(batches + 1):
        if batch == 1:  # the first batch includes one-time initialization
            worker, rest, wall_start, cpu_start = 0.0, 0.0, perf_counter(), process_time()
        start = process_time()
        samples = default_collate([get((batch * BATCH + i) % images, epoch) for i in range(BATCH)])
        middle = process_time()
        if name not in WITHOUT_DEVICE_TRANSFORMS:
            samples = apply_device_transforms(samples)
            samples["targets"] = samples["targets"].long()
        worker, rest = worker + middle - start, rest + process_time() - middle
    return {
        "worker": worker / (batches * BATCH),
        "all": (worker + rest) / (batches * BATCH),
        "waited": 1 - (process_time() - cpu_start) / (perf_counter() - wall_start),
        "adds_mb": private_mb() - before,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def private_mb() -> float:
    """Return the private memory of this process in MB."""
    sizes = re.findall(r"Private_\w+:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"))
    return sum(map(int, sizes)) / 1024


def measure_in_process(name: str, root: Path, epoch: int, batches: int) -> dict[str, float] | None:
    """Measure a contender in a fresh process with one thread. Return None if the contender is not installed."""
    command = [
        sys.executable,
        __file__,
        "--measure",
        name,
        "--folder",
        root,
        "--epoch",
        epoch,
        "--batches",
        batches,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}
    process = subprocess.run(
        [str(word) for word in command], env=env, capture_output=True, text=True, check=False
    )
    if "ModuleNotFoundError" in process.stderr:
        return None
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{process.stderr}")
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def rounds(root: Path, count: int, batches: int) -> Iterator[dict[str, dict[str, float]]]:
    """Yield the measurements of each round, keyed by contender."""
    for epoch in range(1, count + 1):
        measurements = {name: measure_in_process(name, root, epoch, batches) for name in CONTENDERS}
        yield {name: result for name, result in measurements.items() if result is not None}


def summary(results: list[dict[str, dict[str, float]]]) -> str:
    """Return a table of medians over the rounds: the speeds, and their per-round ratios to PIL."""
    rows = []
    for name in results[0]:
        for part in ("worker", "all"):
            if name in WITHOUT_DEVICE_TRANSFORMS and part == "worker":
                continue
            speed = median(1 / r[name][part] for r in results)
            ratio = median(r["PIL"]["all"] / r[name][part] for r in results)
            memory = (f"{median(r[name][key] for r in results):.0f}" for key in ("adds_mb", "peak_mb"))
            waited = f"{median(r[name]['waited'] for r in results):.0%}"
            label = name if name in WITHOUT_DEVICE_TRANSFORMS else f"{name}: {part}"
            rows.append([label, f"{speed:.1f}", f"{ratio:.1f}", waited, *memory])
    return table(["", "images/s per core", "relative to PIL", "time waiting", "added MB", "peak MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each contender")
    parser.add_argument("--images", type=int, default=24, help="number of image pairs to generate")
    parser.add_argument(
        "--batches", type=int, default=6, help="number of batches (of 8 images) per measurement"
    )
    parser.add_argument("--size", default="1024x2048", help="image size as HxW")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.folder, args.epoch, args.batches)))
        return
    info = environment_info(["pillow", "imagecodecs", "albumentations", "opencv-python-headless", "numpy"])
    height, width = map(int, args.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_street_folder(root, train=args.images, val=1, size=(height, width))
        results = list(rounds(root, args.rounds, args.batches))
    text = summary(results)
    print(text)
    if args.out:
        title = (
            f"Images per second on one core: pairs of {width} x {height} PNG files, cityscapes_pplite_seg75"
        )
        write_result(args.out, title, info, text, {"rounds": results})


if __name__ == "__main__":
    main()
