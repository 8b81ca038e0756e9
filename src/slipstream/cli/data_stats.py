"""`slipstream data stats`: report a recipe's dataset statistics, broken files and loading times."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.cli.configure import configure
from slipstream.cli.data_parts import (
    Part,
    image_and_target,
    loader_batch_size,
    map_samples,
    parts_of,
    split_names,
)
from slipstream.cli.data_table import print_statistics
from slipstream.dataset import SampleIndex, SegmentationDataset, apply_transforms, sample_rng
from slipstream.errors import DataError
from slipstream.extras import extra

with extra("images"):
    from PIL import Image

__all__ = ["run"]

_NUM_TIMED = 16  # number of samples to time


class _Sample(NamedTuple):
    """Statistics of one sample."""

    size: tuple[int, int]
    ids: dict[int, int]
    """Pixel count of each class id; a single entry if the image has a class label instead of a mask."""
    values: NDArray[np.int64] | None
    """Histogram of each channel (C, 256), or None if the values are not uint8."""


def run(args: argparse.Namespace) -> int:
    """Print the statistics of the selected splits. Return 1 if any data is broken."""
    cfg = configure(args)
    results, splits, files = [], [], []
    for split in split_names(cfg, args.split):
        try:
            parts = parts_of(cfg, split)
        except DataError as error:  # for example, unpaired files; continue with the other splits
            splits.append(f"{split}: {error}")
            continue
        for part in parts:
            samples = []
            for sample in map_samples(
                _sample_statistics, part.dataset, args.workers, f"{part.title}: reading"
            ):
                samples.append(sample) if isinstance(sample, _Sample) else files.extend(sample)
            results.append({**_content(part, samples), **_costs(part, loader_batch_size(cfg, split))})
            if not args.json:
                print_statistics(results[-1])
    if args.json:
        print(json.dumps({"data": results, "faults": splits + files}, indent=1))
        return 1 if splits or files else 0
    for title, faults in (("Unreadable splits", splits), ("Broken files", files)):
        if faults:
            print(f"{title} ({len(faults)}):", *faults, sep="\n  ")
    return 1 if splits or files else 0


def _sample_statistics(dataset: Any, index: int) -> _Sample | list[str]:
    """Return the statistics of a sample, or a list of its errors."""
    try:
        if not isinstance(dataset, SegmentationDataset):
            return _tensor_statistics(*image_and_target(dataset[index]))
        image, mask = dataset.load(index)
    except DataError as error:
        return list(dict.fromkeys([str(error), *_file_errors(dataset, index)]))
    ids = {i: n for i, n in enumerate(_histogram(mask).tolist()) if n}
    classes, ignored = len(dataset.metainfo["classes"]), dataset.metainfo["ignore_index"]
    if unknown := [i for i in ids if i >= classes and i != ignored]:
        return [
            f"sample {index} of {type(dataset).__name__} has label ids without a class: {unknown}; "
            "correct the mask, the classes or ignore_index"
        ]
    return _Sample((mask.shape[0], mask.shape[1]), ids, _histogram(image).reshape(3, 256))


def _tensor_statistics(image: Tensor, target: Tensor) -> _Sample:
    """Return the statistics of an image (C, H, W) with a class label or a mask."""
    ids, counts = np.unique(target.numpy(), return_counts=True)
    values = None
    if not image.dtype.is_floating_point:
        values = np.stack([_histogram(channel) for channel in image.numpy()])
    height, width = image.shape[-2:]
    return _Sample((height, width), dict(zip(ids.tolist(), counts.tolist(), strict=True)), values)


def _histogram(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.array(Image.fromarray(pixels).histogram(), np.int64)


def _file_errors(dataset: Any, index: int) -> Iterator[str]:
    """Yield an error for each broken file of a sample. `load` stops at the first broken file."""
    for name in ("load_image", "load_mask"):
        try:
            if read := getattr(dataset, name, None):
                read(index)
        except DataError as error:
            yield str(error)


def _content(part: Part, samples: list[_Sample]) -> dict[str, Any]:
    """Return the statistics of a dataset as built-in Python values."""
    pixels, images = Counter[int](), Counter[int]()
    for sample in samples:
        pixels.update(sample.ids)
        images.update(sample.ids.keys())
    meta: Mapping[str, Any] = getattr(part.dataset, "metainfo", None) or {}
    names = meta.get("classes") or [str(i) for i in sorted(pixels)]
    total = max(pixels.total(), 1)
    ignored = meta.get("ignore_index")
    sizes = Counter(sample.size for sample in samples).most_common()
    return {
        "split": part.split,
        "place": part.config_path,
        "dataset": type(part.dataset).__name__,
        "samples": len(part.dataset),
        "readable": len(samples),
        "augmented": not isinstance(part.dataset, SegmentationDataset),
        "sizes": [{"height": h, "width": w, "samples": n} for (h, w), n in sizes],
        "classes": [
            {"id": i, "name": name, "share": pixels[i] / total, "samples": images[i]}
            for i, name in enumerate(names)
        ],
        "ignored": None if ignored is None else pixels[ignored] / total,
        **_moments([sample.values for sample in samples if sample.values is not None]),
    }


def _moments(values: list[NDArray[np.int64]]) -> dict[str, list[float] | None]:
    """Return the mean and standard deviation of each channel over all pixels, in the range 0 to 255."""
    if not values:
        return {"mean": None, "std": None}
    counts = np.sum(values, axis=0)
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ np.arange(256)
    variance = (share * (np.arange(256) - mean[:, None]) ** 2).sum(1)
    return {"mean": mean.tolist(), "std": np.sqrt(variance).tolist()}


def _costs(part: Part, batch: int | None) -> dict[str, Any]:
    """Return the median loading times per sample in one process, in seconds, and the size of a batch in bytes."""
    dataset, sizes = part.dataset, []
    seconds = defaultdict[str, list[float]](list)
    for index in np.linspace(0, len(dataset) - 1, min(_NUM_TIMED, len(dataset))).astype(int).tolist():
        try:
            sample = _load_timed(dataset, index, seconds)
        except DataError:
            continue  # already reported
        tensors = sample.values() if isinstance(sample, Mapping) else sample
        sizes.append(sum(t.nbytes for t in tensors if isinstance(t, Tensor)))
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "batch": {
            "samples": batch,
            "bytes": round(batch * statistics.fmean(sizes)) if batch and sizes else None,
        },
    }


def _load_timed(dataset: Any, index: int, seconds: Mapping[str, list[float]]) -> Any:
    """Return a sample and append its loading times to `seconds`."""
    start = perf_counter()
    if not isinstance(dataset, SegmentationDataset):
        sample: Any = dataset[index]
        seconds["whole"].append(perf_counter() - start)
        return sample
    image, mask = dataset.load(index)
    loaded = perf_counter()
    rng = sample_rng(SampleIndex(index, 0, 0))
    sample = apply_transforms(dataset.transforms, {"image": image, "mask": mask}, rng)
    seconds["decode"].append(loaded - start)
    seconds["transforms"].append(perf_counter() - loaded)
    return sample
