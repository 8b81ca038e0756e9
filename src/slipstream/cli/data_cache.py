"""`slipstream data cache`: decode all samples of a recipe into a cache on disk, and verify it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cli.configure import configure
from slipstream.cli.data_parts import Part, each, parts_of, split_names
from slipstream.cli.data_table import written_size
from slipstream.config import Config
from slipstream.dataset import DecodeCache, SegmentationDataset
from slipstream.errors import ConfigError, DataError
from slipstream.recipes import find_recipe, is_composed

__all__ = ["run"]

_SAMPLED = 8  # samples from whose sizes the room is estimated
_ROOTS = ("data_root", "root_dir", "root")  # what the data sets call their folder


def run(args: argparse.Namespace) -> int:
    """Fill the caches of all splits; return 1 if a sample cannot be read."""
    if args.prune and args.split:
        raise ConfigError("--prune removes what no split needs: it cannot go with --split")
    cfg = configure(args)
    places = [
        (part, DecodeCache(_folder(args.folder, part, cfg)))
        for split in split_names(cfg, args.split)
        for part in _cacheable(parts_of(cfg, split))
    ]
    for folder in dict.fromkeys(cache.folder for _, cache in places):
        _check_room(folder, [part for part, cache in places if cache.folder == folder])
    faults: list[str] = []
    for part, cache in places:
        faults += _fill_all(part, cache, args.workers)
    if args.prune:
        _prune(places)
    if faults:
        print(f"Not cached ({len(faults)}):", *faults, sep="\n  ")
    if words := _missing_words(args, places):
        print("To train with it, add to the command, or the same keys to the recipe:", *words, sep="\n  ")
    return 1 if faults else 0


def _missing_words(args: argparse.Namespace, places: list[tuple[Part, DecodeCache]]) -> list[str]:
    """Return the overrides that make the recipe use the caches, as far as it does not yet."""
    composed = is_composed(find_recipe(args.config, args.config_dir))
    new = [(p, c) for p, c in places if p.dataset.cache is None or p.dataset.cache.folder != c.folder]
    key = "+dataset_params.{0.split}_dataset_params.cache" if composed else "{0.place}.cache"
    return list(dict.fromkeys(f"{key.format(part)}={cache.folder}" for part, cache in new))


def _cacheable(parts: list[Part]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part.dataset, SegmentationDataset):
            yield part
        else:
            print(f"{part.place}: {type(part.dataset).__name__} has nothing to cache: it decodes no files")


def _folder(given: str | None, part: Part, cfg: Config) -> Path:
    """Return where the cache of a data set shall be: as it is said, or beside the folder of the data."""
    if given:
        return Path(given)
    if part.dataset.cache is not None:
        return Path(part.dataset.cache.folder)
    node: Any = cfg
    for word in part.place.split("."):
        node = node[int(word)] if isinstance(node, list) else node.get(word, {})
    for name in _ROOTS:
        if root := node.get(name):
            root = Path(root).expanduser().absolute()
            return root.with_name(f"{root.name}.cache")
    raise ConfigError(
        f"{type(part.dataset).__name__} has no folder beside which the cache could be: give --folder",
        part.place,
    )


def _check_room(folder: Path, parts: list[Part]) -> None:
    """Say what the samples that are missing need, and what is free.

    Raises:
        DataError: it is not enough.
    """
    need = sum(_needed(part.dataset, DecodeCache(folder)) for part in parts)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    print(f"{folder}: needs about {written_size(need)} more; {written_size(free)} are free")
    if need > free:
        raise DataError(f"'{there}' has not enough room for the cache: name another folder with --folder")


def _needed(dataset: Any, cache: DecodeCache) -> float:
    missing = [i for i, which in _known(dataset) if not cache.path(which).is_file()]
    places = np.linspace(0, len(missing) - 1, min(_SAMPLED, len(missing))).astype(int)
    sizes = [_size(dataset, missing[place]) for place in places]
    known = [size for size in sizes if size is not None]
    return len(missing) * sum(known) / max(len(known), 1)


def _known(dataset: Any) -> Iterator[tuple[int, str]]:
    """Yield each sample with what the cache calls it, but those whose files are not there."""
    for i in range(len(dataset)):
        try:
            yield i, dataset.cache_key(i)[0]
        except DataError:
            continue  # it will be listed


def _size(dataset: Any, index: int) -> int | None:
    try:
        return DecodeCache.file_size(dataset.load(index)[1].shape)
    except DataError:
        return None  # it will be listed


def _fill_all(part: Part, cache: DecodeCache, workers: int | None) -> list[str]:
    """Fill the cache with a data set's samples, say how that went, and return what cannot be read."""
    faults, sizes, made = [], [], 0
    for result in each(partial(_fill, cache), part.dataset, workers, f"{part.title}: caching"):
        if isinstance(result, str):
            faults.append(result)
        else:
            size, new = result
            sizes.append(size)
            made += new
    print(
        f"{part.title}: {len(sizes):,} samples, {written_size(sum(sizes))}, verified; "
        f"{made:,} decoded now, {len(sizes) - made:,} were there"
    )
    return faults


def _fill(cache: DecodeCache, dataset: Any, index: int) -> tuple[int, bool] | str:
    """Return the size of the sample's file and whether it was made now, or why it cannot be."""
    try:
        key = dataset.cache_key(index)
        if new := cache.read(key) is None:
            cache.write(key, *dataset.load(index))
            if cache.read(key) is None:
                raise DataError(f"'{cache.path(key[0])}' is not what was written: is the disk sound?")
        return cache.path(key[0]).stat().st_size, new
    except DataError as error:
        return str(error)
    except OSError as error:
        raise ConfigError(
            f"cannot write to '{cache.folder}' ({error.strerror or error}): name another folder with --folder"
        ) from error


def _prune(places: list[tuple[Part, DecodeCache]]) -> None:
    for folder in dict.fromkeys(cache.folder for _, cache in places):
        keep = [
            which for part, cache in places if cache.folder == folder for _, which in _known(part.dataset)
        ]
        count, size = DecodeCache(folder).prune(keep)
        print(f"{folder}: {count:,} files removed, {written_size(size)}")
