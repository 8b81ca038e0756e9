"""`slipstream data cache`: decode all samples of a recipe into a verified cache on disk."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cli.configure import configure
from slipstream.cli.data_parts import Part, map_samples, parts_of, split_names
from slipstream.cli.data_table import format_size
from slipstream.config import Config
from slipstream.dataset import DecodeCache, SegmentationDataset
from slipstream.errors import ConfigError, DataError
from slipstream.recipes import find_recipe, is_composed

__all__ = ["run"]

_NUM_SAMPLED = 8  # number of samples used to estimate the required disk space
_ROOTS = ("data_root", "root_dir", "root")  # names of the datasets' data folder arguments


def run(args: argparse.Namespace) -> int:
    """Fill the caches of the selected splits. Return 1 if a sample cannot be read."""
    if args.prune and args.split:
        raise ConfigError(
            "`--prune` removes files that no split uses, so it cannot be combined with `--split`"
        )
    cfg = configure(args)
    caches = [
        (part, DecodeCache(_folder(args.folder, part, cfg)))
        for split in split_names(cfg, args.split)
        for part in _cacheable(parts_of(cfg, split))
    ]
    for folder in dict.fromkeys(cache.folder for _, cache in caches):
        _check_disk_space(folder, [part for part, cache in caches if cache.folder == folder])
    faults: list[str] = []
    for part, cache in caches:
        faults += _fill_all(part, cache, args.workers)
    if args.prune:
        _prune(caches)
    if faults:
        print(f"Not cached ({len(faults)}):", *faults, sep="\n  ")
    if overrides := _missing_overrides(args, caches):
        print(
            "To train with the cache, add these overrides to the command or to the recipe:",
            *overrides,
            sep="\n  ",
        )
    return 1 if faults else 0


def _missing_overrides(args: argparse.Namespace, caches: list[tuple[Part, DecodeCache]]) -> list[str]:
    """Return the overrides that enable caches that the recipe does not use yet."""
    composed = is_composed(find_recipe(args.config, args.config_dir))
    missing = [(p, c) for p, c in caches if p.dataset.cache is None or p.dataset.cache.folder != c.folder]
    key = "+dataset_params.{0.split}_dataset_params.cache" if composed else "{0.config_path}.cache"
    return list(dict.fromkeys(f"{key.format(part)}={cache.folder}" for part, cache in missing))


def _cacheable(parts: list[Part]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part.dataset, SegmentationDataset):
            yield part
        else:
            print(
                f"{part.config_path}: {type(part.dataset).__name__} does not decode files; nothing to cache"
            )


def _folder(option: str | None, part: Part, cfg: Config) -> Path:
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
        f"{type(part.dataset).__name__} has no data folder from which to derive the cache folder; set `--folder`",
        part.config_path,
    )


def _check_disk_space(folder: Path, parts: list[Part]) -> None:
    """Print the free disk space, and the disk space required for the samples that are not cached yet.

    Raises:
        DataError: there is not enough free disk space.
    """
    required = sum(_required_bytes(part.dataset, DecodeCache(folder)) for part in parts)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    print(f"{folder}: needs about {format_size(required)} more; {format_size(free)} is free")
    if required > free:
        raise DataError(
            f"not enough disk space in '{existing}' for the cache; use `--folder` to set a different folder"
        )


def _required_bytes(dataset: Any, cache: DecodeCache) -> float:
    missing = [i for i, key in _cache_keys(dataset) if not cache.path(key).is_file()]
    positions = np.linspace(0, len(missing) - 1, min(_NUM_SAMPLED, len(missing))).astype(int)
    sizes = [_size(dataset, missing[p]) for p in positions]
    known = [size for size in sizes if size is not None]
    return len(missing) * sum(known) / max(len(known), 1)


def _cache_keys(dataset: Any) -> Iterator[tuple[int, str]]:
    """Yield the index and the cache key of each sample whose files exist."""
    for i in range(len(dataset)):
        try:
            yield i, dataset.cache_key(i)[0]
        except DataError:
            continue  # reported by `_fill_all`


def _size(dataset: Any, index: int) -> int | None:
    try:
        return DecodeCache.file_size(dataset.load(index)[1].shape)
    except DataError:
        return None  # reported by `_fill_all`


def _fill_all(part: Part, cache: DecodeCache, workers: int | None) -> list[str]:
    """Cache the samples of a dataset, print a summary, and return an error for each unreadable sample."""
    faults, sizes, decoded = [], [], 0
    for result in map_samples(partial(_fill, cache), part.dataset, workers, f"{part.title}: caching"):
        if isinstance(result, str):
            faults.append(result)
        else:
            size, new = result
            sizes.append(size)
            decoded += new
    print(
        f"{part.title}: {len(sizes):,} sample{'s' * (len(sizes) != 1)}, {format_size(sum(sizes))}, verified; "
        f"{decoded:,} decoded now, {len(sizes) - decoded:,} already cached"
    )
    return faults


def _fill(cache: DecodeCache, dataset: Any, index: int) -> tuple[int, bool] | str:
    """Return the size of the cached file and whether it is new, or the error message."""
    try:
        key = dataset.cache_key(index)
        if new := cache.read(key) is None:
            cache.write(key, *dataset.load(index))
            if cache.read(key) is None:
                raise DataError(
                    f"'{cache.path(key[0])}' does not contain the data that was written; check the disk for errors"
                )
        return cache.path(key[0]).stat().st_size, new
    except DataError as error:
        return str(error)
    except OSError as error:
        raise ConfigError(
            f"cannot write to '{cache.folder}' ({error.strerror or error}); use `--folder` to set a different folder"
        ) from error


def _prune(caches: list[tuple[Part, DecodeCache]]) -> None:
    for folder in dict.fromkeys(cache.folder for _, cache in caches):
        keys = [
            key for part, cache in caches if cache.folder == folder for _, key in _cache_keys(part.dataset)
        ]
        count, size = DecodeCache(folder).prune(keys)
        print(f"{folder}: {count:,} file{'s' * (count != 1)} removed, {format_size(size)}")
