"""`slipstream data`: inspect and cache a recipe's data."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from slipstream.cli.configure import configure
from slipstream.cli.tables import print_table
from slipstream.config import Config, add_config_path
from slipstream.cores import cores
from slipstream.dataset import DecodeCache, SegmentationDataset, default_palette
from slipstream.dataset.loading.loader import build_dataloader, order_of, set_epoch
from slipstream.dataset.transforms.device_transforms import NUM_COLOR_PARAMS, transform_images
from slipstream.errors import ConfigError, DataError
from slipstream.recipes import find_recipe, is_composed
from slipstream.registry import DATASETS, default_scope
from slipstream.visualization import colorize, contact_sheet, overlay

T = TypeVar("T")
RGB = NDArray[np.uint8]

_ROOTS = ("data_root", "root_dir", "root")  # names of the datasets' data folder arguments


def run(args: argparse.Namespace) -> int:
    """Run `slipstream data stats`, `cache` or `show`. Return 1 if any data is broken."""
    cfg = configure(args)
    return {"stats": _stats, "cache": _cache, "show": _show}[args.action](args, cfg)


# ---- the datasets of a recipe ----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A dataset that is not a wrapper around other datasets."""

    split: str
    # Path of the dataset in the configuration, such as `train_dataloader.dataset`.
    config_path: str
    dataset: Any


def _splits(cfg: Config, requested: str | None) -> list[str]:
    splits = [name for name in ("train", "val", "test") if cfg.get(f"{name}_dataloader") is not None]
    if requested is None and splits:
        return splits
    if requested not in splits:
        known = ", ".join(splits) or "none"
        raise ConfigError(f"the recipe has no {requested or 'train'}_dataloader (available splits: {known})")
    return [requested]


def _parts(cfg: Config, split: str) -> list[_Part]:
    """Return the datasets of a split, without the wrappers around them.

    Raises:
        SlipstreamError: a dataset cannot be built or is iterable-style. The message includes its config path.
    """
    loader = cfg[f"{split}_dataloader"]
    dataset = loader.dataset if isinstance(loader, DataLoader) else loader.get("dataset")
    if isinstance(dataset, Mapping):
        with _context(cfg):
            dataset = DATASETS.build(dataset)
    return list(_leaves(split, f"{split}_dataloader.dataset", dataset))


def _leaves(split: str, config_path: str, dataset: Any) -> Iterator[_Part]:
    if hasattr(dataset, "datasets"):
        for i, inner in enumerate(dataset.datasets):
            yield from _leaves(split, f"{config_path}.datasets.{i}", inner)
    elif hasattr(dataset, "dataset"):
        yield from _leaves(split, f"{config_path}.dataset", dataset.dataset)
    else:
        _check_map_style(dataset, config_path)
        yield _Part(split, config_path, dataset)


def _check_map_style(dataset: Any, config_path: str) -> None:
    if dataset is None or isinstance(dataset, IterableDataset):
        raise ConfigError(f"must be a map-style dataset, not {type(dataset).__name__}", config_path)


@contextmanager
def _context(cfg: Config) -> Iterator[None]:
    """Use the configuration's registry scope, and add config paths to error messages."""
    with add_config_path(cfg), default_scope(cfg.get("default_scope", "slipstream")):
        yield


def _image_and_target(sample: Any) -> tuple[Tensor, Tensor]:
    """Return the image (C, H, W) and the class ids of a sample: `inputs` and `targets`, or the first two items."""
    if isinstance(sample, Mapping):
        sample = (sample.get("inputs"), sample.get("targets"))
    image, target = tuple(sample)[:2] if isinstance(sample, tuple | list) else (None, None)
    if not isinstance(image, Tensor) or image.ndim != 3 or not isinstance(target, Tensor | int):
        raise ConfigError(
            "a sample must be {'inputs': tensor (C, H, W), 'targets': tensor or int} or a tuple"
        )
    return image, torch.as_tensor(target)


def _map_samples(function: Callable[[Any, int], T], dataset: Any, workers: int | None) -> Iterator[T]:
    """Yield `function(dataset, i)` for all samples in order, computed in `workers` processes."""
    workers, call = min(workers or cores(), len(dataset)), partial(function, dataset)
    if workers <= 1:
        yield from map(call, range(len(dataset)))
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(call, range(len(dataset)), chunksize=max(1, len(dataset) // (8 * workers)))


# ---- stats -----------------------------------------------------------------------------------------------------


def _stats(args: argparse.Namespace, cfg: Config) -> int:
    results, faults = [], []
    for split in _splits(cfg, args.split):
        try:
            parts = _parts(cfg, split)
        except DataError as error:  # for example, unpaired files; continue with the other splits
            faults.append(f"{split}: {error}")
            continue
        for part in parts:
            found = list(_map_samples(_sample, part.dataset, args.workers))
            faults += [sample for sample in found if isinstance(sample, str)]
            results.append(_content(part, [sample for sample in found if not isinstance(sample, str)]))
            if not args.json:
                _print_statistics(results[-1])
    if args.json:
        print(json.dumps({"data": results, "faults": faults}, indent=1))
    elif faults:
        print(f"Broken data ({len(faults)}):", *faults, sep="\n  ")
    return 1 if faults else 0


class _Sample(NamedTuple):
    size: tuple[int, int]
    # Pixel count of each class id; a single entry if the image has a class label instead of a mask.
    pixels: dict[int, int]
    # Histogram of each channel (C, 256), or None if the values are not uint8.
    values: NDArray[np.int64] | None


def _sample(dataset: Any, index: int) -> _Sample | str:
    """Return the statistics of a sample, or the error."""
    try:
        if isinstance(dataset, SegmentationDataset):
            image, target = dataset.load(index)
            image = image.transpose(2, 0, 1)
        else:
            image, target = (tensor.numpy() for tensor in _image_and_target(dataset[index]))
    except DataError as error:
        return str(error)
    ids, counts = np.unique(target, return_counts=True)
    pixels = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    if isinstance(dataset, SegmentationDataset):
        known = {*range(len(dataset.metainfo["classes"])), dataset.metainfo["ignore_index"]}
        if unknown := pixels.keys() - known:
            return (
                f"sample {index} of {type(dataset).__name__} has label ids without a class: {sorted(unknown)}"
            )
    is_uint8 = image.dtype == np.uint8
    values = np.stack([np.bincount(c.ravel(), minlength=256) for c in image]) if is_uint8 else None
    return _Sample(image.shape[1:], pixels, values)


def _content(part: _Part, samples: Sequence[_Sample]) -> dict[str, Any]:
    """Return the statistics of a dataset as built-in Python values."""
    pixels, images = Counter[int](), Counter[int]()
    for sample in samples:
        pixels.update(sample.pixels)
        images.update(sample.pixels.keys())
    meta: Mapping[str, Any] = getattr(part.dataset, "metainfo", None) or {}
    names = meta.get("classes") or [str(i) for i in sorted(pixels)]
    total, ignored = max(pixels.total(), 1), meta.get("ignore_index")
    sizes = Counter(sample.size for sample in samples).most_common()
    mean, std = _moments([sample.values for sample in samples if sample.values is not None])
    return {
        "place": part.config_path,
        "dataset": type(part.dataset).__name__,
        "samples": len(part.dataset),
        "readable": len(samples),
        "sizes": [{"height": h, "width": w, "samples": n} for (h, w), n in sizes],
        "classes": [
            {"id": i, "name": name, "share": pixels[i] / total, "samples": images[i]}
            for i, name in enumerate(names)
        ],
        "ignored": None if ignored is None else pixels[ignored] / total,
        "mean": mean,
        "std": std,
    }


def _moments(values: Sequence[NDArray[np.int64]]) -> tuple[list[float] | None, list[float] | None]:
    """Return the mean and standard deviation of each channel over all pixels, in the range 0 to 255."""
    if not values:
        return None, None
    counts = np.sum(values, axis=0)
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ np.arange(256)
    return mean.tolist(), np.sqrt((share * (np.arange(256) - mean[:, None]) ** 2).sum(1)).tolist()


def _print_statistics(content: Mapping[str, Any]) -> None:
    sizes = [f"{size['width']} x {size['height']} ({size['samples']:,})" for size in content["sizes"][:8]]
    print(
        f"{content['place']}: {content['samples']:,} samples of {content['dataset']} ({content['readable']:,} "
        f"readable), pixels (width x height): {', '.join(sizes) or 'none readable'}"
    )
    rows = [(str(c["id"]), c["name"], f"{c['share']:.2%}", f"{c['samples']:,}") for c in content["classes"]]
    if content["ignored"] is not None:
        rows.append(("", "(ignored)", f"{content['ignored']:.2%}", ""))
    print_table(("id", "class", "share", "samples"), rows, 80, right=("id", "share", "samples"))
    unused = [entry["name"] for entry in content["classes"] if not entry["samples"]]
    if unused and content["readable"]:
        print(f"Warning: classes without pixels: {', '.join(unused)}")
    if content["mean"] is not None:
        mean, std = (" ".join(f"{value:.2f}" for value in content[name]) for name in ("mean", "std"))
        print(f"mean {mean}  std {std}  (per channel, 0 to 255)")


# ---- cache -----------------------------------------------------------------------------------------------------


def _cache(args: argparse.Namespace, cfg: Config) -> int:
    caches = [
        (part, DecodeCache(_folder(args.folder, part, cfg)))
        for split in _splits(cfg, args.split)
        for part in _parts(cfg, split)
        if isinstance(part.dataset, SegmentationDataset)
    ]
    if not caches:
        print("No dataset of this recipe decodes files; there is nothing to cache")
    faults: list[str] = []
    for part, cache in caches:
        faults += _fill_all(part, cache, args.workers)
    if faults:
        print(f"Not cached ({len(faults)}):", *faults, sep="\n  ")
    composed = is_composed(find_recipe(args.config, args.config_dir))
    key = "+dataset_params.{0.split}_dataset_params.cache" if composed else "{0.config_path}.cache"
    missing = [(p, c) for p, c in caches if p.dataset.cache is None or p.dataset.cache.folder != c.folder]
    if overrides := dict.fromkeys(f"{key.format(part)}={cache.folder}" for part, cache in missing):
        print(
            "To train with the cache, add these overrides to the command or recipe:", *overrides, sep="\n  "
        )
    return 1 if faults else 0


def _folder(option: str | None, part: _Part, cfg: Config) -> Path:
    """Return the cache folder of a dataset: `option`, the recipe's folder, or a folder next to the data."""
    if option:
        return Path(option)
    if part.dataset.cache is not None:
        return Path(part.dataset.cache.folder)
    node: Any = cfg
    for word in part.config_path.split("."):
        node = node[int(word)] if isinstance(node, list) else node.get(word, {})
    for name in _ROOTS:
        if root := node.get(name):
            root = Path(root).expanduser().absolute()
            return root.with_name(f"{root.name}.cache")
    raise ConfigError(
        "the dataset has no data folder next to which to cache; set `--folder`", part.config_path
    )


def _fill_all(part: _Part, cache: DecodeCache, workers: int | None) -> list[str]:
    """Cache the samples of a dataset, print a summary, and return an error for each unreadable sample."""
    results = list(_map_samples(partial(_fill, cache), part.dataset, workers))
    filled = [result for result in results if not isinstance(result, str)]
    decoded = sum(new for _, new in filled)
    print(
        f"{part.config_path}: {len(filled):,} samples, {sum(size for size, _ in filled) / 1e6:.1f} MB, verified; "
        f"{decoded:,} decoded now, {len(filled) - decoded:,} already cached"
    )
    return [result for result in results if isinstance(result, str)]


def _fill(cache: DecodeCache, dataset: Any, index: int) -> tuple[int, bool] | str:
    """Return the size of the cached file and whether it is new, or the error message."""
    try:
        key = dataset.cache_key(index)
        if new := cache.read(key) is None:
            cache.write(key, *dataset.load(index))
            if cache.read(key) is None:
                raise DataError(
                    f"'{cache.path(key[0])}' was not written correctly; check the disk for errors"
                )
        return cache.path(key[0]).stat().st_size, new
    except (DataError, OSError) as error:
        return str(error)


# ---- show ------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace, cfg: Config) -> int:
    """Write a contact sheet of the first samples of an epoch, in the order of the data loader."""
    (split,) = _splits(cfg, args.split or "train")
    out = Path(args.out or f"{split}_epoch_{args.epoch}.png")
    loader = cfg[f"{split}_dataloader"]
    if isinstance(loader, Mapping):  # worker processes do not affect the samples
        loader = {**loader, "num_workers": 0, "multiprocessing_context": None}
    if args.epoch < 0:
        raise ConfigError(f"must be at least 0, not {args.epoch}", "--epoch")
    seed = (cfg.get("randomness") or {}).get("seed") or 0
    with _context(cfg):
        loader = build_dataloader(loader, seed, f"{split}_dataloader", training=split == "train")
    _check_map_style(loader.dataset, f"{split}_dataloader.dataset")
    set_epoch(loader, args.epoch)
    indices: list[Any] = list(islice(chain.from_iterable(order_of(loader) or ()), args.count))
    if not indices:
        raise ConfigError("yields no batches; check the dataset length and drop_last", f"{split}_dataloader")
    samples = [loader.dataset[index] for index in indices]
    captions = [f"sample {int(index)}, epoch {index.epoch}, seed {index.seed}" for index in indices]
    sheet = _sheet(samples, captions, getattr(loader.dataset, "metainfo", None) or {})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(out)
    except (OSError, ValueError) as error:  # ValueError: Pillow does not support the file extension
        raise ConfigError(f"cannot write '{out}': {error}; choose a different file", "--out") from error
    print(f"{out}: {len(samples)} samples of the {split} split, as loaded in epoch {args.epoch}")
    return 0


def _sheet(samples: Sequence[Any], captions: Sequence[str], meta: Mapping[str, Any]) -> Any:
    pairs = [(_display_image(sample), _image_and_target(sample)[1].numpy()) for sample in samples]
    classes, ignored = meta.get("classes") or range(256), meta.get("ignore_index")
    palette = meta.get("palette") or default_palette(256)
    if pairs[0][1].ndim == 0:  # class labels
        named = [
            f"{caption}: {classes[int(label)]}" for (_, label), caption in zip(pairs, captions, strict=True)
        ]
        return contact_sheet([(image,) for image, _ in pairs], ("image",), named, ())
    rows = [
        (image, colorize(mask, palette, ignored), overlay(image, mask, palette, 0.55, ignored))
        for image, mask in pairs
    ]
    legend = list(zip(map(str, classes), palette, strict=False)) if meta.get("classes") else ()
    return contact_sheet(rows, ("image", "mask", "overlay"), captions, legend)


def _display_image(sample: Any) -> RGB:
    """Return the image (uint8, H x W x 3) with on-device color transforms applied, but without normalization."""
    image = _image_and_target(sample)[0]
    params = sample.get("device_params") if isinstance(sample, Mapping) else None
    if params is not None and len(params) >= NUM_COLOR_PARAMS:
        image = transform_images(image[None], params[None, :NUM_COLOR_PARAMS])[0].round().to(torch.uint8)
    if image.dtype.is_floating_point:  # normalized by the dataset; rescale min..max to 0..255
        image = image - image.min()
        image = (image * (255 / image.max().clamp(min=1e-6))).round().to(torch.uint8)
    return image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
