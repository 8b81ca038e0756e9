"""`slipstream predict`: write color masks for images."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from slipstream.checkpoint import (
    DESCRIPTION,
    check,
    find_latest_checkpoint,
    load_checkpoint,
    load_weights,
    weights_in,
)
from slipstream.cli.configure import load_config
from slipstream.config import Config
from slipstream.config.placeholders import fill_references
from slipstream.config.yaml_format import BoundedLoader
from slipstream.dataset import sample_rng
from slipstream.dataset.transforms.pipeline import compose
from slipstream.devices import default_device
from slipstream.errors import CheckpointError, ConfigError, DataError
from slipstream.extras import extra
from slipstream.registry import MODELS, TRANSFORMS
from slipstream.visualization import colorize, overlay

with extra("images"):
    from PIL import Image, UnidentifiedImageError

    from slipstream.dataset.sources.decode import MAX_PIXELS, open_image

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Write `NAME_mask.png` and `NAME_overlay.png` for each image to the folder `--out`."""
    path = Path(args.checkpoint) if args.checkpoint else _newest_checkpoint()
    checkpoint = load_checkpoint(path)
    meta = checkpoint.get("meta") or {}
    check(meta, DESCRIPTION, path, "meta")
    cfg = load_config(args.config, trust=bool(args.trust)).cfg if args.config else _own_config(meta, path)
    palette = (meta.get("dataset_meta") or {}).get("palette")
    if palette is None:
        raise CheckpointError(
            f"{path} does not contain a class palette; `slipstream predict` requires a segmentation checkpoint"
        )
    _check_stems(args.images)
    predict = _predictor(cfg, checkpoint, path)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder: {error}", "--out") from error
    for name in args.images:
        image = _read(Path(name), args.max_pixels or MAX_PIXELS)
        mask = predict(image)
        stem = out / Path(name).stem
        Image.fromarray(colorize(mask, palette)).save(f"{stem}_mask.png")
        Image.fromarray(overlay(image, mask, palette)).save(f"{stem}_overlay.png")
        print(f"{name} -> {stem}_mask.png, {stem}_overlay.png")
    return 0


def _check_stems(images: Sequence[str]) -> None:
    by_stem: dict[str, str] = {}
    for name in images:
        first = by_stem.setdefault(Path(name).stem, name)
        if Path(first) != Path(name):
            raise DataError(
                f"{first} and {name} have the same output files; process them with different `--out` folders"
            )


def _newest_checkpoint() -> Path:
    folders = sorted(Path("work_dirs").glob("*/last_checkpoint"), key=lambda p: p.stat().st_mtime)
    found = find_latest_checkpoint(folders[-1].parent) if folders else None
    if found is None:
        raise CheckpointError("no checkpoint found in work_dirs/; train first or set `--checkpoint`")
    return found


def _own_config(meta: Mapping[str, Any], path: Path) -> Config:
    """Return the configuration in a checkpoint as plain data: `_base_` is not followed, and nothing is imported."""
    try:
        cfg = Config(fill_references(yaml.load(meta["cfg"], BoundedLoader) or {}))
    except (KeyError, AttributeError, ConfigError, TypeError, ValueError, RecursionError, yaml.YAMLError):
        cfg = Config({})
    if "model" not in cfg:
        raise CheckpointError(f"{path} does not contain its configuration; set `--config`")
    return cfg


def _predictor(cfg: Config, checkpoint: Mapping[str, Any], path: Path) -> Callable[[np.ndarray], np.ndarray]:
    device = default_device()
    model = MODELS.build(cfg.model).to(device).eval()
    load_weights(model, weights_in(checkpoint, path), strict=True, source=str(path))
    dataset = (cfg.get("val_dataloader") or {}).get("dataset") or {}
    # A wrapper dataset uses the transforms of its inner datasets.
    while inner := dataset.get("dataset") or dataset.get("datasets"):
        dataset = inner[0] if isinstance(inner, list) else inner
    transforms = [TRANSFORMS.build(t) for t in dataset.get("transforms", ())]

    @torch.no_grad()
    def predict(image: np.ndarray) -> np.ndarray:
        no_mask = np.zeros(
            image.shape[:2], np.uint8
        )  # used as the target, so that the model crops its padding
        composed = compose(transforms, {"image": image, "mask": no_mask}, sample_rng(0))
        batch = {key: value[None] for key, value in composed.packed().items()}
        left, top, right, bottom = composed.region.image_box  # excludes padding added by transforms
        mask = model.val_step(batch)["preds"][0, top:bottom, left:right].to(torch.uint8).cpu().numpy()
        size = (image.shape[1], image.shape[0])
        return np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))

    return predict


def _read(path: Path, max_pixels: int) -> np.ndarray:
    try:
        with open_image(path, max_pixels) as image:
            return np.asarray(image.convert("RGB"))
    except FileNotFoundError as error:
        raise DataError(f"image file not found: {path}") from error
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"cannot read {path} as an image: {error}") from error
