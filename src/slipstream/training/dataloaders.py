"""Data loaders by SuperGradients' names: `cityscapes_train`, `cifar10_val`, ..., and in its words.

Each name stands for a data set and for defaults, those of `recipes/dataset_params`; what is given goes before them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS
from slipstream.training.factories import configuration, read_factory
from slipstream.training.params import plain

__all__ = ["config", "get"]

# The data set of each name; its defaults lie in NAME_dataset_params.yaml.
_DATASETS = {
    "cifar10": "CIFAR10",
    "cityscapes": "CityscapesDataset",
    "cityscapes_ddrnet": "CityscapesDataset",
    "cityscapes_regseg48": "CityscapesDataset",
    "cityscapes_stdc_seg50": "CityscapesDataset",
    "cityscapes_stdc_seg75": "CityscapesDataset",
    "street_scenes": "StreetScenes",
}
# Names of transforms in older recipes. What makes a tensor there divides by 255 too.
_OLD_TRANSFORMS = {
    "ColorJitterSeg": "SegColorJitter",
    "CropImageAndMaskSeg": "SegCropImageAndMask",
    "NormalizeSeg": "SegNormalize",
    "PadShortToCropSizeSeg": "SegPadShortToCropSize",
    "RandomFlipSeg": "SegRandomFlip",
    "RandomRescaleSeg": "SegRandomRescale",
    "RescaleSeg": "SegRescale",
    "SegToTensor": "SegStandardize",
    "ToTensorSeg": "SegStandardize",
}
_NAMES = [f"{name}_{split}" for name in _DATASETS for split in ("train", "val")]
_DEFAULTS = Path(__file__).parents[1] / "recipes" / "dataset_params"
_WORDS = {*inspect.signature(DataLoader).parameters, "min_samples"}


def config(
    name: str | None = None,
    dataset_params: Mapping[str, Any] | None = None,
    dataloader_params: Mapping[str, Any] | None = None,
    dataset: Dataset[Any] | None = None,
) -> dict[str, Any]:
    """Return the Runner's configuration of a data loader.

    The data set is the one that `name` stands for, `dataloader_params.dataset` (a class in the registry), or
    `dataset`. Loaders whose name ends in `_train` shuffle and leave out the last, smaller batch, unless something else
    is said.

    Args:
        name: one of the names, or None.
        dataset_params: arguments of the data set; in `transforms`, each is a name, `{Name: {arguments}}`, a
            configuration with `type`, or an object. None counts as not given.
        dataloader_params: arguments of `torch.utils.data.DataLoader`; `sampler` and `collate_fn` may be names or
            `{Name: {arguments}}`; `min_samples` repeats a data set that is smaller.
        dataset: a ready data set.

    Raises:
        UnknownNameError: nothing is called `name`, or a key of `dataloader_params` is no loader's.
        ConfigError: no data set is named, or more than one.
    """
    data, loader = _given(dataset_params), _given(dataloader_params)
    named = loader.pop("dataset", None)
    if sum(value is not None for value in (name, named, dataset)) != 1:
        raise ConfigError(
            "a data loader needs one of a name, dataloader_params.dataset and a ready dataset; "
            f"got {name!r}, {named!r} and {type(dataset).__name__ if dataset is not None else None}"
        )
    if name is not None:
        named, data, loader = _completed(name, data, loader)
    _check_words(loader)
    if dataset is None:
        kind, arguments = read_factory(named, "dataloader_params.dataset")
        dataset_config: Any = {"type": kind, **_transforms({**arguments, **data})}
    elif data:
        raise ConfigError("a ready dataset has its parameters already; leave them out", "dataset_params")
    else:
        dataset_config = dataset
    if (least := loader.pop("min_samples", None)) is not None:
        dataset_config = {"type": "AtLeast", "dataset": dataset_config, "min_samples": least}
    training = name is not None and name.endswith("_train")
    return {"dataset": dataset_config, **_loader_options(loader, training)}


def get(
    name: str | None = None,
    dataset_params: Mapping[str, Any] | None = None,
    dataloader_params: Mapping[str, Any] | None = None,
    dataset: Dataset[Any] | None = None,
    dataloader: DataLoader[Any] | None = None,
) -> DataLoader[Any]:
    """Return a data loader, or `dataloader` if that is given; for the arguments and errors see `config`.

    In a job of several processes, and for its order of samples, the Trainer makes its own of it.
    """
    if dataloader is not None:
        if any(value is not None for value in (name, dataset_params, dataloader_params, dataset)):
            raise ConfigError(
                "a ready dataloader has its parameters already; leave the others out", "dataloader"
            )
        return dataloader
    options = config(name, dataset_params, dataloader_params, dataset)
    data, sampler = options.pop("dataset"), options.pop("sampler")
    data = DATASETS.build(data) if isinstance(data, Mapping) else data
    if isinstance(sampler, Mapping) and sampler["type"] == "DefaultSampler":
        # Torch's own, which the Runner shares out when the processes have found each other.
        options["shuffle"] = sampler.get("shuffle", True)
    elif isinstance(sampler, Mapping):
        arguments = {key: value for key, value in sampler.items() if key != "type"}
        options["sampler"] = DATA_SAMPLERS.resolve(sampler["type"])(data, **arguments)
    else:
        options["sampler"] = sampler
    if isinstance(collate := options.get("collate_fn"), Mapping):
        arguments = {key: value for key, value in collate.items() if key != "type"}
        options["collate_fn"] = partial(FUNCTIONS.resolve(collate["type"]), **arguments)
    if "auto" in (options["num_workers"], options.get("prefetch_factor")):
        raise ConfigError(
            "'auto' is measured when the Runner builds a loader: give a number here, or pass the Trainer "
            "dataloaders.config(...) in place of dataloaders.get(...)",
            "dataloader_params.num_workers",
        )
    if not options["num_workers"]:
        options = {k: v for k, v in options.items() if k not in ("persistent_workers", "prefetch_factor")}
    return DataLoader(data, **options)


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (plain(params) or {}).items() if value is not None}


def _completed(
    name: str, data: dict[str, Any], loader: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the data set of `name`, and both parameters with its defaults."""
    if name not in _NAMES:
        raise UnknownNameError(
            f"there is no data loader '{name}'{did_you_mean(name, _NAMES)} (there are: {', '.join(_NAMES)}; for a data "
            "set of your own, name its class in dataloader_params.dataset)"
        )
    variant, _, split = name.rpartition("_")
    defaults = _read_defaults(f"{variant}_dataset_params")
    own = defaults[f"{split}_dataset_params"]
    if "list_file" in data:
        own.pop("split", None)
    return _DATASETS[variant], {**own, **data}, {**defaults[f"{split}_dataloader_params"], **loader}


def _read_defaults(name: str) -> dict[str, Any]:
    """Return a file of `recipes/dataset_params` on top of those that its `defaults` name, as plain values."""
    with extra("recipes"):
        from omegaconf import OmegaConf

    top: Any = OmegaConf.load(_DEFAULTS / f"{name}.yaml")
    below = [entry for entry in top.pop("defaults", []) if entry != "_self_"]
    merged = OmegaConf.merge(*(OmegaConf.create(_read_defaults(entry)) for entry in below), top)
    return dict(plain(merged))


def _check_words(loader: Mapping[str, Any]) -> None:
    for key in loader:
        if key not in _WORDS:
            raise UnknownNameError(
                f"a data loader has no such option{did_you_mean(key, _WORDS)}", f"dataloader_params.{key}"
            )


def _transforms(data: dict[str, Any]) -> dict[str, Any]:
    if isinstance(transforms := data.get("transforms"), list | tuple):
        data["transforms"] = [
            _in_new_words(configuration(entry, f"dataset_params.transforms[{i}]"))
            for i, entry in enumerate(transforms)
        ]
    return data


def _in_new_words(transform: Any) -> Any:
    if not isinstance(transform, Mapping):
        return transform
    kind = transform.get("type")
    return {**transform, "type": _OLD_TRANSFORMS.get(kind, kind) if isinstance(kind, str) else kind}


def _loader_options(loader: dict[str, Any], training: bool) -> dict[str, Any]:
    shuffle, sampler = loader.pop("shuffle", None), loader.pop("sampler", None)
    if isinstance(loader.get("batch_sampler"), bool):
        del loader["batch_sampler"]  # SuperGradients' word for torch's BatchSampler, the usual one here
    if loader.get("pin_memory") is True:
        del loader["pin_memory"]  # done anyway where there is a device to pin for
    if "collate_fn" in loader:
        loader["collate_fn"] = configuration(loader["collate_fn"], "dataloader_params.collate_fn")
    return {
        "sampler": _sampler(sampler, training if shuffle is None else shuffle, shuffle),
        "batch_size": 1,
        "num_workers": 0,
        "drop_last": training,
        "persistent_workers": True,
        **loader,
    }


def _sampler(sampler: Any, shuffles: bool, shuffle: bool | None) -> Any:
    if sampler is None:
        return {"type": "DefaultSampler", "shuffle": shuffles}
    cfg = configuration(sampler, "dataloader_params.sampler")
    if not isinstance(cfg, Mapping):
        return cfg
    # Torch's needs several processes; ours parts the samples among as many as there are.
    kind = "DefaultSampler" if cfg["type"] == "DistributedSampler" else cfg["type"]
    if shuffle is not None and "shuffle" in inspect.signature(DATA_SAMPLERS.resolve(kind)).parameters:
        return {"shuffle": shuffle, **cfg, "type": kind}
    return {**cfg, "type": kind}


def __getattr__(name: str) -> Any:
    """Return `get` of a name: `dataloaders.cityscapes_train(dataset_params={...})`."""
    if name in _NAMES:
        return partial(get, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'{did_you_mean(name, _NAMES)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_NAMES])
