"""Collate functions, and mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899) for a batch of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate as torch_default_collate

from slipstream.dataset.transforms.device_transforms import NUM_AFFINE_PARAMS
from slipstream.errors import ConfigError, DataError
from slipstream.registry import FUNCTIONS

__all__ = ["collate_mixup", "default_collate", "pseudo_collate", "torch_default_collate"]

FUNCTIONS.register_module(name="torch_default_collate", module=torch_default_collate)

# Parts of torch's messages; in a worker process, the second one appears if the first tensor is the largest.
_UNEQUAL = (
    "stack expects each tensor",
    "storage that is not resizable",
    "list of batch should be of equal size",
)


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Stack samples as torch's `default_collate` does.

    Raises:
        DataError: tensors of different sizes, or lists of different lengths, cannot be stacked.
    """
    try:
        return torch_default_collate(list(data_batch))
    except RuntimeError as error:
        if not any(part in str(error) for part in _UNEQUAL):
            raise
        raise DataError(
            f"the samples of a batch cannot be stacked ({error}); add a transform that resizes, crops or pads them to "
            "one size, use a batch size of 1, or set collate_fn='pseudo_collate', which returns lists"
        ) from error


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Return a batch with the structure of a sample, in which each leaf is a list with one value per sample.

    Values are not stacked or converted, so they may differ in shape. Mappings, lists and named tuples keep
    their type; tuples become lists, as in torch's `default_collate`.

    Raises:
        DataError: the samples contain sequences of different lengths.
    """
    first = data_batch[0]
    if isinstance(first, Mapping):
        return type(first)({key: pseudo_collate([d[key] for d in data_batch]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, str | bytes) or not isinstance(first, Sequence):
        return list(data_batch)
    if len({len(sample) for sample in data_batch}) > 1:
        raise DataError(f"cannot collate samples of different lengths: {[len(s) for s in data_batch]}")
    columns = [pseudo_collate(column) for column in zip(*data_batch, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else columns


@FUNCTIONS.register_module(name="CollateMixup")
def collate_mixup(
    data_batch: Sequence[Any],
    mixup_alpha: float = 1.0,
    cutmix_alpha: float = 0.0,
    prob: float = 1.0,
    switch_prob: float = 0.5,
    correct_lam: bool = True,
    label_smoothing: float = 0.1,
    num_classes: int = 1000,
    mode: str = "batch",
    cutmix_minmax: None = None,
) -> Any:
    """Return a batch of N images in which image i is mixed with image N - 1 - i. The targets are class probabilities.

    A factor l, which is the same for the whole batch, is drawn from Beta(alpha, alpha). Mixup returns
    `l * image + (1 - l) * other`, in float32. CutMix replaces a rectangle that covers the fraction 1 - l of the image's
    area with the same rectangle of the other image. After label smoothing, the targets are mixed with the same factor.
    Random numbers are drawn from torch's global generator, which a loader seeds for each batch.

    Args:
        data_batch: samples with `inputs`, (C, H, W) in the range 0 to 255, and `targets`, a class id; or (inputs,
            targets) pairs.
        mixup_alpha: alpha of mixup; 0 disables it.
        cutmix_alpha: alpha of CutMix; 0 disables it.
        prob: probability of mixing a batch.
        switch_prob: probability of using CutMix instead of mixup if both are enabled.
        correct_lam: whether CutMix recomputes l from the part of the rectangle that is inside the image.
        label_smoothing: probability mass that is distributed evenly over all classes.
        num_classes: number of classes.
        mode: must be 'batch'.
        cutmix_minmax: must be None.

    Raises:
        ConfigError: the value of an argument is not supported, or both alphas are 0.
        DataError: the number of samples is odd, the transforms include color jitter, or a class id is out of range.
    """
    if mode != "batch" or cutmix_minmax is not None:
        raise ConfigError("supports only mode='batch' without cutmix_minmax", "collate_fn")
    if max(mixup_alpha, cutmix_alpha) <= 0:
        raise ConfigError("mixup_alpha or cutmix_alpha must be greater than 0", "collate_fn")
    if len(data_batch) % 2:
        raise DataError(
            f"mixup requires an even batch_size and drop_last=True, not a batch of {len(data_batch)}"
        )
    images, ids, others = _stacked(data_batch)
    probabilities = _smoothed(ids, num_classes, label_smoothing)
    uses_cutmix = cutmix_alpha > 0 and (mixup_alpha <= 0 or bool(torch.rand(()) < switch_prob))
    alpha = cutmix_alpha if uses_cutmix else mixup_alpha
    factor = float(torch.distributions.Beta(alpha, alpha).sample()) if torch.rand(()) < prob else 1.0
    if factor < 1:
        images, factor = (
            _cut(images, factor, correct_lam) if uses_cutmix else (_mixed(images, factor), factor)
        )
    targets = _mixed(probabilities, factor)
    return (images, targets) if others is None else {"inputs": images, "targets": targets, **others}


def _stacked(samples: Sequence[Any]) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
    """Return float32 images, class ids, and the other items of a batch of dicts."""
    if not isinstance(samples[0], Mapping):
        stacked = torch.stack([sample[0] for sample in samples]).float()
        return stacked, torch.as_tensor([int(sample[1]) for sample in samples]), None
    others = {}
    if "device_params" in samples[0]:
        others["device_params"] = torch.stack([sample["device_params"] for sample in samples])
        if others["device_params"].shape[-1] != NUM_AFFINE_PARAMS:
            raise DataError("CollateMixup does not support color jitter; remove it from the transforms")
    images = torch.stack([sample["inputs"] for sample in samples]).float()
    return images, torch.as_tensor([int(sample["targets"]) for sample in samples]), others


def _smoothed(ids: Tensor, num_classes: int, label_smoothing: float) -> Tensor:
    """Return the class probabilities for each id after label smoothing."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < num_classes:
        raise DataError(
            f"class ids {int(ids.min())} to {int(ids.max())} do not match num_classes={num_classes}"
        )
    return F.one_hot(ids, num_classes) * (1 - label_smoothing) + label_smoothing / num_classes


def _mixed(values: Tensor, factor: float) -> Tensor:
    """Return `factor` times each item plus `1 - factor` times the item at the same position from the end."""
    return values * factor + values.flip(0) * (1 - factor)


def _cut(images: Tensor, factor: float, correct: bool) -> tuple[Tensor, float]:
    """Return the images, each with a rectangle from its counterpart, and the factor with which to mix the targets."""
    height, width = images.shape[-2:]
    side = (1 - factor) ** 0.5
    sides = []
    for length in (height, width):
        half = int(length * side) // 2
        middle = int(torch.randint(length, ()))
        sides.append((max(middle - half, 0), min(middle + half, length)))
    (top, bottom), (left, right) = sides
    cut = images.clone()
    cut[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    area = (bottom - top) * (right - left) / (height * width)
    return cut, 1 - area if correct else factor
