"""The data sets of a recipe, and work on all samples of one in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.config import Config
from slipstream.cores import cores
from slipstream.errors import ConfigError
from slipstream.registry import DATASETS, default_scope
from slipstream.runner.user_config import add_config_path

__all__ = [
    "Part",
    "check_numbered",
    "each",
    "image_and_target",
    "loader_batch",
    "parts_of",
    "reading",
    "split_names",
]

T = TypeVar("T")

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Part:
    """A data set that reads samples itself, as opposed to one made of others."""

    split: str
    place: str
    """Where it stands in the configuration."""
    dataset: Any

    @property
    def title(self) -> str:
        """Its split, and its place if that has several."""
        return self.split if self.place.count(".") == 1 else self.place


def split_names(cfg: Config, only: str | None) -> list[str]:
    """Return the splits that a recipe has, or the one that is asked for.

    Raises:
        ConfigError: it has not.
    """
    found = [split for split in _SPLITS if cfg.get(f"{split}_dataloader") is not None]
    if only is None and found:
        return found
    if only not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"the recipe has no {only or 'train'}_dataloader (its splits: {known})")
    return [only]


def parts_of(cfg: Config, split: str) -> list[Part]:
    """Return the data sets of a split.

    Raises:
        SlipstreamError: a data set cannot be built, or is a stream; it says where.
    """
    loader = cfg[f"{split}_dataloader"]
    dataset = loader.dataset if isinstance(loader, DataLoader) else loader.get("dataset")
    if dataset is None:
        raise ConfigError("needs a 'dataset'", f"{split}_dataloader")
    if isinstance(dataset, Mapping):
        with reading(cfg):
            dataset = DATASETS.build(dataset)
    return list(_leaves(split, f"{split}_dataloader.dataset", dataset))


def check_numbered(dataset: Any, place: str) -> None:
    """Raise ConfigError if the data set is a stream."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is a stream, of which no sample can be asked for by its number", place
        )


@contextmanager
def reading(cfg: Config) -> Iterator[None]:
    """Look names up in the configuration's scope, and place errors in it."""
    with add_config_path(cfg), default_scope(cfg.get("default_scope", "slipstream")):
        yield


def loader_batch(cfg: Config, split: str) -> int | None:
    """Return how many samples a batch of the split has, or None if only its own batch sampler knows."""
    loader = cfg[f"{split}_dataloader"]
    if isinstance(loader, DataLoader):
        return loader.batch_size
    return None if loader.get("batch_sampler") else loader.get("batch_size", 1)


def image_and_target(sample: Any) -> tuple[Tensor, Tensor]:
    """Return the image (C, H, W) and the class ids of a sample: `inputs` and `targets`, or the first two of a tuple.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(sample, Mapping):
        pair: tuple[Any, ...] = (sample.get("inputs"), sample.get("targets"))
    else:
        pair = tuple(sample)[:2] if isinstance(sample, tuple | list) else ()
    image, target = pair if len(pair) == 2 else (None, None)
    if not isinstance(image, Tensor) or image.ndim != 3 or not isinstance(target, Tensor | int):
        raise ConfigError(
            "'slipstream data' reads samples of images and class ids: {'inputs': tensor (C, H, W), "
            f"'targets': tensor or int}}, or a tuple of the two, not {type(sample).__name__}"
        )
    return image, torch.as_tensor(target)


def each(function: Callable[[Any, int], T], dataset: Any, workers: int | None, title: str) -> Iterator[T]:
    """Yield `function(dataset, i)` for all samples, in order, with a progress bar.

    Args:
        function: of a module.
        workers: processes; by default one for each core.
    """
    from rich.console import Console
    from rich.progress import track

    workers = min(workers or cores(), len(dataset))
    calls = DataLoader(
        _Calls(function, dataset),
        batch_size=None,
        num_workers=workers if workers > 1 else 0,
        collate_fn=_as_it_is,
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    yield from track(calls, title, len(dataset), console=console, transient=True, disable=hidden)


class _Calls(Dataset[Any]):
    def __init__(self, function: Callable[[Any, int], Any], dataset: Any) -> None:
        self.function = function
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.function(self.dataset, index)


def _as_it_is(result: Any) -> Any:
    return result


def _leaves(split: str, place: str, dataset: Any) -> Iterator[Part]:
    if hasattr(dataset, "datasets"):
        for i, inner in enumerate(dataset.datasets):
            yield from _leaves(split, f"{place}.datasets.{i}", inner)
    elif hasattr(dataset, "dataset"):
        yield from _leaves(split, f"{place}.dataset", dataset.dataset)
    else:
        check_numbered(dataset, place)
        yield Part(split, place, dataset)
