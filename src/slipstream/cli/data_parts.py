"""A recipe's datasets, and parallel iteration over their samples."""

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
from slipstream.dataset.sources.streaming import as_map_style
from slipstream.errors import ConfigError
from slipstream.registry import DATASETS, default_scope
from slipstream.runner.user_config import add_config_path

__all__ = [
    "Part",
    "check_map_style",
    "config_context",
    "image_and_target",
    "loader_batch_size",
    "map_samples",
    "parts_of",
    "split_names",
]

T = TypeVar("T")

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Part:
    """A dataset that is not a wrapper around other datasets."""

    split: str
    config_path: str
    """Path of the dataset in the configuration, such as `train_dataloader.dataset`."""
    dataset: Any

    @property
    def title(self) -> str:
        """The split name, or the config path if other datasets wrap this dataset."""
        return self.split if self.config_path.count(".") == 1 else self.config_path


def split_names(cfg: Config, requested: str | None) -> list[str]:
    """Return all splits of a recipe, or only the requested one.

    Raises:
        ConfigError: the recipe does not have the requested split, or has no splits.
    """
    splits = [split for split in _SPLITS if cfg.get(f"{split}_dataloader") is not None]
    if requested is None and splits:
        return splits
    if requested not in splits:
        known = ", ".join(splits) or "none"
        raise ConfigError(f"the recipe has no {requested or 'train'}_dataloader (available splits: {known})")
    return [requested]


def parts_of(cfg: Config, split: str) -> list[Part]:
    """Return the datasets of a split, without the wrappers around them.

    Raises:
        SlipstreamError: a dataset cannot be built or is iterable-style. The message includes its config path.
    """
    loader = cfg[f"{split}_dataloader"]
    dataset = loader.dataset if isinstance(loader, DataLoader) else loader.get("dataset")
    if dataset is None:
        raise ConfigError("the key 'dataset' is missing; set it to a dataset", f"{split}_dataloader")
    if isinstance(dataset, Mapping):
        with config_context(cfg):
            dataset = DATASETS.build(dataset)
    return list(_leaves(split, f"{split}_dataloader.dataset", as_map_style(dataset)))


def check_map_style(dataset: Any, config_path: str) -> None:
    """Raise ConfigError if the dataset is iterable-style."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an iterable-style dataset; a map-style dataset is required",
            config_path,
        )


@contextmanager
def config_context(cfg: Config) -> Iterator[None]:
    """Use the configuration's registry scope, and add config paths to error messages."""
    with add_config_path(cfg), default_scope(cfg.get("default_scope", "slipstream")):
        yield


def loader_batch_size(cfg: Config, split: str) -> int | None:
    """Return the batch size of the split, or None if a custom batch sampler determines it."""
    loader = cfg[f"{split}_dataloader"]
    if isinstance(loader, DataLoader):
        return loader.batch_size
    return None if loader.get("batch_sampler") else loader.get("batch_size", 1)


def image_and_target(sample: Any) -> tuple[Tensor, Tensor]:
    """Return the image (C, H, W) and the class ids of a sample: `inputs` and `targets`, or the first two tuple items.

    Raises:
        ConfigError: the sample has neither of these forms.
    """
    if isinstance(sample, Mapping):
        pair: tuple[Any, ...] = (sample.get("inputs"), sample.get("targets"))
    else:
        pair = tuple(sample)[:2] if isinstance(sample, tuple | list) else ()
    image, target = pair if len(pair) == 2 else (None, None)
    if not isinstance(image, Tensor) or image.ndim != 3 or not isinstance(target, Tensor | int):
        raise ConfigError(
            "for `slipstream data`, a sample must be {'inputs': tensor (C, H, W), 'targets': tensor or int} or a tuple "
            f"of these two values, not {type(sample).__name__}"
        )
    return image, torch.as_tensor(target)


def map_samples(
    function: Callable[[Any, int], T], dataset: Any, workers: int | None, title: str
) -> Iterator[T]:
    """Yield `function(dataset, i)` for all samples in order. Show a progress bar if stderr is a terminal.

    Args:
        function: a module-level function, so that it can be pickled.
        workers: number of processes; by default, one per core.
    """
    from rich.console import Console
    from rich.progress import track

    workers = min(workers or cores(), len(dataset))
    calls = DataLoader(
        _Calls(function, dataset),
        batch_size=None,
        num_workers=workers if workers > 1 else 0,
        collate_fn=_identity,
    )
    console = Console(stderr=True)
    # rich 13.0 prints an empty line for a disabled progress bar.
    show_progress = console.is_terminal
    yield from track(calls, title, len(dataset), console=console, transient=True) if show_progress else calls


class _Calls(Dataset[Any]):
    def __init__(self, function: Callable[[Any, int], Any], dataset: Any) -> None:
        self.function = function
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.function(self.dataset, index)


def _identity(result: Any) -> Any:
    return result


def _leaves(split: str, config_path: str, dataset: Any) -> Iterator[Part]:
    if hasattr(dataset, "datasets"):
        for i, inner in enumerate(dataset.datasets):
            yield from _leaves(split, f"{config_path}.datasets.{i}", inner)
    elif hasattr(dataset, "dataset"):
        yield from _leaves(split, f"{config_path}.dataset", dataset.dataset)
    else:
        check_map_style(dataset, config_path)
        yield Part(split, config_path, dataset)
