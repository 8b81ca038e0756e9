"""Data loaders with SuperGradients' names (`cityscapes_train`, `cifar10_val`, ...) and arguments.

Each name selects a dataset and its defaults in `recipes/dataset_params`. Arguments override these defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.recipes.find import FOLDER
from slipstream.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, TRANSFORMS
from slipstream.training.params import configuration, default_fill_mask, plain, read_factory

__all__ = ["config", "get"]

# Maps each name to its dataset class. The defaults are in NAME_dataset_params.yaml.
_DATASETS = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "cityscapes": "CityscapesDataset",
    **{
        f"cityscapes_{name}": "CityscapesDataset"
        for name in ("ddrnet", "regseg48", "stdc_seg50", "stdc_seg75")
    },
    "coco_segmentation": "CoCoSegmentationDataSet",
    "imagenet": "ImageNetDataset",
    "imagenet_resnet50": "ImageNetDataset",
    "street_scenes": "StreetScenes",
    "supervisely_persons": "SuperviselyPersonsDataset",
}
# Transforms of older recipes that also divide by 255. Other old names have `Seg` at the end: `RescaleSeg`.
_OLD_TRANSFORMS = {"SegToTensor": "SegStandardize", "ToTensorSeg": "SegStandardize"}
# torchvision's transforms that have an equivalent of the same name in Slipstream, and their arguments.
_TORCHVISION: Mapping[str, tuple[str, ...]] = {
    "Normalize": ("mean", "std"), "RandomCrop": ("size", "padding"), "RandomHorizontalFlip": ("p",), "ToTensor": (),
}  # fmt: skip
# torchvision's arguments that have no equivalent, and their default values.
_UNSUPPORTED = {"padding_mode": "constant", "fill": 0, "pad_if_needed": False}
_NAMES = [f"{name}_{split}" for name in _DATASETS for split in ("train", "val")]
_LOADER_KEYS = {*inspect.signature(DataLoader).parameters, "skip_errors", "min_samples"}


def config(
    name: str | None = None,
    dataset_params: Mapping[str, Any] | None = None,
    dataloader_params: Mapping[str, Any] | None = None,
    dataset: Dataset[Any] | None = None,
) -> dict[str, Any]:
    """Return a data loader configuration for the Runner.

    Exactly one of `name`, `dataloader_params.dataset` (a registered class) and `dataset` selects the dataset. By
    default, loaders whose names end in `_train` shuffle the samples and drop the last incomplete batch.

    Args:
        name: a data loader name, or None.
        dataset_params: arguments of the dataset. Each entry of `transforms` is a name, `{Name: {arguments}}`, a
            configuration with `type`, or an object. None values are ignored.
        dataloader_params: arguments of `torch.utils.data.DataLoader`. The values of `sampler` and `collate_fn` may be
            names or `{Name: {arguments}}`. A dataset with fewer than `min_samples` samples is repeated.
        dataset: a dataset object.

    Raises:
        UnknownNameError: if `name` or a key of `dataloader_params` does not exist.
        ConfigError: if no dataset or more than one dataset is specified.
    """
    data, loader = _without_none(dataset_params), _without_none(dataloader_params)
    registered = loader.pop("dataset", None)
    if sum(value is not None for value in (name, registered, dataset)) != 1:
        raise ConfigError("exactly one of name, dataloader_params.dataset and dataset is required")
    if name is not None:
        registered, data, loader = _with_defaults(name, data, loader)
    for key in loader:
        if key not in _LOADER_KEYS:
            hint = did_you_mean(key, _LOADER_KEYS)
            raise UnknownNameError(f"a data loader has no such argument{hint}", f"dataloader_params.{key}")
    dataset_config: Any = dataset
    if dataset is None:
        kind, own = read_factory(registered, "dataloader_params.dataset")
        dataset_config = {"type": kind, **_transforms({**own, **data})}
    elif data:
        raise ConfigError("a dataset object does not accept parameters; remove them", "dataset_params")
    if (min_samples := loader.pop("min_samples", None)) is not None:
        dataset_config = {"type": "AtLeast", "dataset": dataset_config, "min_samples": min_samples}
    training = name is not None and name.endswith("_train")
    return {"dataset": dataset_config, **_loader_options(loader, training)}


def get(
    name: str | None = None,
    dataset_params: Mapping[str, Any] | None = None,
    dataloader_params: Mapping[str, Any] | None = None,
    dataset: Dataset[Any] | None = None,
    dataloader: DataLoader[Any] | None = None,
    *,
    kind: type[DataLoader[Any]] = DataLoader,
) -> DataLoader[Any]:
    """Return a data loader. If `dataloader` is given, return it unchanged. For arguments and errors, see `config`.

    As in SuperGradients, the loader has a `dataloader_params` attribute, and a dataset that is built here has
    `dataset_params` and `classes` (a list of names). Slipstream's datasets return dicts, not tuples.

    The Trainer rebuilds the loader with its own sampler to support a reproducible order and distributed training.
    """
    if dataloader is not None:
        return dataloader
    options = config(name, dataset_params, dataloader_params, dataset)
    data, sampler = options.pop("dataset"), options.pop("sampler")
    if isinstance(data, Mapping):
        data = _built(data)
    target, keywords = _kind_and_arguments(sampler)
    if target == "DefaultSampler":
        # Use torch's own sampler. The Runner replaces it after the process group is initialized.
        options["shuffle"] = keywords.get("shuffle", True)
    else:
        options["sampler"] = sampler if target is None else DATA_SAMPLERS.resolve(target)(data, **keywords)
    target, keywords = _kind_and_arguments(options.get("collate_fn"))
    if target is not None:
        options["collate_fn"] = partial(FUNCTIONS.resolve(target), **keywords)
    if options["num_workers"] == "auto" or "skip_errors" in options:
        raise ConfigError("'auto' and skip_errors require dataloaders.config", "dataloader_params")
    if not options["num_workers"]:
        options = {k: v for k, v in options.items() if k not in ("persistent_workers", "prefetch_factor")}
    loader: Any = kind(data, **options)
    loader.dataloader_params = options
    return loader


def _kind_and_arguments(cfg: Any) -> tuple[Any, dict[str, Any]]:
    """Return the type and the other values of a configuration; for an object, None and an empty dict."""
    arguments = dict(cfg) if isinstance(cfg, Mapping) else {}
    return arguments.pop("type", None), arguments


def _built(cfg: Mapping[str, Any]) -> Any:
    """Build the dataset, and add SuperGradients' attributes."""
    data: Any = DATASETS.build(cfg)
    data.dataset_params = {key: value for key, value in cfg.items() if key != "type"}
    classes = (getattr(data, "metainfo", None) or {}).get("classes")
    if classes is not None and not hasattr(data, "classes"):
        data.classes = list(classes)
    return data


def _without_none(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (plain(params) or {}).items() if value is not None}


def _with_defaults(name: str, data: dict[str, Any], loader: dict[str, Any]) -> tuple[str, Any, Any]:
    """Return the dataset class for `name`, and its default parameters updated with `data` and `loader`."""
    if name not in _NAMES:
        raise UnknownNameError(f"no '{name}' exists{did_you_mean(name, _NAMES)} (available: {_NAMES})")
    variant, _, split = name.rpartition("_")
    defaults = read_group("dataset_params", f"{variant}_dataset_params")
    own = defaults[f"{split}_dataset_params"]
    if "list_file" in data:
        own.pop("split", None)
    return _DATASETS[variant], {**own, **data}, {**defaults[f"{split}_dataloader_params"], **loader}


def read_group(group: str, name: str) -> dict[str, Any]:
    """Return the values of a file in a config group of the recipes, merged over those of its `defaults`."""
    with extra("recipes"):
        from omegaconf import OmegaConf

    top: Any = OmegaConf.load(FOLDER / group / f"{name}.yaml")
    parents = [entry for entry in top.pop("defaults", []) if entry != "_self_"]
    merged = OmegaConf.merge(*(OmegaConf.create(read_group(group, entry)) for entry in parents), top)
    return dict(plain(merged))


def _transforms(data: dict[str, Any]) -> dict[str, Any]:
    if isinstance(entries := data.get("transforms"), list | tuple):
        own = enumerate(_own_transforms(entries))
        data["transforms"] = [_transform(entry, f"dataset_params.transforms[{i}]") for i, entry in own]
    return data


def _own_transforms(transforms: Sequence[Any]) -> list[Any]:
    """Return the transforms with Slipstream's equivalents of torchvision's, unless one has no equivalent."""
    others = [t for t in transforms if type(t).__module__.startswith("torchvision.transforms")]
    for transform in others:
        changed = (getattr(transform, key, default) != default for key, default in _UNSUPPORTED.items())
        if type(transform).__name__ not in _TORCHVISION or any(changed):
            return list(transforms)
    return [_equivalent(transform) if transform in others else transform for transform in transforms]


def _equivalent(transform: Any) -> dict[str, Any]:
    name = type(transform).__name__
    arguments = {key: getattr(transform, key) for key in _TORCHVISION[name]}
    return {name: {key: value for key, value in arguments.items() if value is not None}}


def _transform(entry: Any, config_path: str) -> Any:
    """Return a transform with its current name."""
    transform = configuration(entry, config_path)
    if not isinstance(transform, Mapping) or not isinstance(kind := transform.get("type"), str):
        return transform
    if kind not in TRANSFORMS:
        kind = _OLD_TRANSFORMS.get(kind, f"Seg{kind.removesuffix('Seg')}" if kind.endswith("Seg") else kind)
    changed = {**transform, "type": kind}
    if kind == "SegPadShortToCropSize" and changed.get("fill_mask") is None:
        changed["fill_mask"] = default_fill_mask()
    return changed


def _loader_options(loader: dict[str, Any], training: bool) -> dict[str, Any]:
    shuffle, sampler = loader.pop("shuffle", None), loader.pop("sampler", None)
    if isinstance(loader.get("batch_sampler"), bool):  # a flag; the Runner always uses a BatchSampler
        del loader["batch_sampler"]
    if loader.get("pin_memory") is True:
        del loader["pin_memory"]  # the Runner pins memory if an accelerator is available
    if "collate_fn" in loader:
        loader["collate_fn"] = configuration(loader["collate_fn"], "dataloader_params.collate_fn")
    if sampler is None:
        sampler, shuffle = {"type": "DefaultSampler"}, training if shuffle is None else shuffle
    return {
        "sampler": _sampler(sampler, shuffle),
        "batch_size": 1,
        "num_workers": 0,
        "drop_last": training,
        "persistent_workers": True,
        **loader,
    }


def _sampler(sampler: Any, shuffle: bool | None) -> Any:
    cfg = configuration(sampler, "dataloader_params.sampler")
    if not isinstance(cfg, Mapping):
        return cfg
    # torch's DistributedSampler requires a process group. DefaultSampler works for any world size.
    kind = "DefaultSampler" if cfg["type"] == "DistributedSampler" else cfg["type"]
    if shuffle is not None and "shuffle" in inspect.signature(DATA_SAMPLERS.resolve(kind)).parameters:
        return {"shuffle": shuffle, **cfg, "type": kind}
    return {**cfg, "type": kind}


def __getattr__(name: str) -> Any:
    """Return `get` with `name` as its first argument, for calls such as `cityscapes_train(dataset_params={...})`."""
    if name in _NAMES:
        return partial(get, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'{did_you_mean(name, _NAMES)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_NAMES])
