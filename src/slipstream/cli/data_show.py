"""`slipstream data show`: write a contact sheet of samples as the network receives them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from slipstream.cli.configure import configure
from slipstream.cli.data_parts import check_map_style, config_context, image_and_target, split_names
from slipstream.config import Config
from slipstream.dataset import default_palette
from slipstream.dataset.loading.loader import build_dataloader, set_epoch
from slipstream.dataset.transforms.device_transforms import NUM_COLOR_PARAMS, transform_images
from slipstream.errors import ConfigError
from slipstream.visualization import colorize, contact_sheet, overlay
from slipstream.visualization.segmentation import ignored_color

__all__ = ["run"]

_ALPHA = 0.55
_NUM_COLUMNS = 3  # number of images per row if the samples have no masks

RGB = NDArray[np.uint8]


def run(args: argparse.Namespace) -> int:
    """Write a contact sheet of the first samples of an epoch, in the order of the data loader."""
    if args.epoch < 0:
        raise ConfigError(f"`--epoch` must be at least 0, not {args.epoch}")
    cfg = configure(args)
    (split,) = split_names(cfg, args.split or "train")
    out = Path(args.out or f"{split}_epoch_{args.epoch}.png")
    loader = _loader(cfg, split)
    check_map_style(loader.dataset, f"{split}_dataloader.dataset")
    set_epoch(loader, args.epoch)
    indices = list(islice(chain.from_iterable(loader.batch_sampler or ()), args.count))
    if not indices:
        raise ConfigError(
            "the data loader yields no batches to show; check the dataset length and drop_last",
            f"{split}_dataloader",
        )
    samples = [loader.dataset[index] for index in indices]
    captions = [f"sample {int(index)}, epoch {index.epoch}, seed {index.seed}" for index in indices]
    sheet = _sheet(samples, captions, getattr(loader.dataset, "metainfo", None) or {})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(out)
    except (OSError, ValueError) as error:  # ValueError: Pillow does not support the file extension
        raise ConfigError(f"cannot write '{out}': {error}; choose a different file", "--out") from error
    count = f"{len(samples)} sample{'s' * (len(samples) != 1)}"
    print(f"{out}: {count} of the {split} split, as loaded by a single process in epoch {args.epoch}")
    return 0


def _loader(cfg: Config, split: str) -> DataLoader[Any]:
    """Return the split's data loader without worker processes. Worker processes do not affect the samples."""
    loader = cfg[f"{split}_dataloader"]
    if isinstance(loader, Mapping):
        loader = {**loader, "num_workers": 0, "multiprocessing_context": None}
    seed = (cfg.get("randomness") or {}).get("seed") or 0
    with config_context(cfg):
        return build_dataloader(loader, seed, f"{split}_dataloader", training=split == "train")


def _sheet(samples: Sequence[Any], captions: Sequence[str], meta: Mapping[str, Any]) -> Any:
    pairs = [(_display_image(sample), image_and_target(sample)[1].numpy()) for sample in samples]
    classes, ignored = meta.get("classes") or (), meta.get("ignore_index")
    palette = meta.get("palette") or default_palette(256)
    if pairs[0][1].ndim == 0:
        return _labeled_sheet(pairs, captions, classes)
    rows = []
    for image, mask in pairs:
        colored = colorize(mask, palette, ignored)
        rows.append((image, colored, overlay(image, mask, palette, _ALPHA, ignored)))
    legend = list(zip(classes, palette, strict=False))
    if ignored is not None:
        legend.append(("(ignored)", ignored_color(palette)))
    return contact_sheet(rows, ("image", "mask", "overlay"), captions, legend)


def _labeled_sheet(pairs: Sequence[tuple[RGB, Any]], captions: Sequence[str], classes: Sequence[str]) -> Any:
    """Return a contact sheet of images, each with its class name below it."""
    blank = np.full_like(pairs[0][0], 255)
    images = [image for image, _ in pairs] + [blank] * (-len(pairs) % _NUM_COLUMNS)
    names = [
        f"{caption.split(',')[0]}: {classes[int(label)] if classes else int(label)}"
        for (_, label), caption in zip(pairs, captions, strict=True)
    ]
    starts = range(0, len(images), _NUM_COLUMNS)
    rows = [images[start : start + _NUM_COLUMNS] for start in starts]
    return contact_sheet(rows, [""] * _NUM_COLUMNS, [names[start : start + _NUM_COLUMNS] for start in starts])


def _display_image(sample: Any) -> RGB:
    """Return the image (uint8, H x W x 3) with on-device color transforms applied, but without normalization."""
    image, params = image_and_target(sample)[0], None
    if isinstance(sample, Mapping):
        params = sample.get("device_params")
    if params is not None and len(params) >= NUM_COLOR_PARAMS:
        image = transform_images(image[None], params[None, :NUM_COLOR_PARAMS])[0].round().to(torch.uint8)
    if image.dtype.is_floating_point:  # normalized by the dataset; rescale min..max to 0..255
        image = image - image.min()
        image = (image * (255 / image.max().clamp(min=1e-6))).round().to(torch.uint8)
    if len(image) == 1:
        image = image.expand(3, -1, -1)
    return image.permute(1, 2, 0).contiguous().numpy()
