"""Run inference on images: read images, apply the validation transforms, and resize the class ids to the image size."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.checkpoint import stored_config
from slipstream.dataset import default_palette, sample_rng
from slipstream.dataset.prediction import PreparedImage, prepare_image, validation_transforms
from slipstream.dataset.sources.decode import read_image
from slipstream.dataset.transforms.device_transforms import apply_device_transforms
from slipstream.dataset.transforms.image_transforms import read_transforms
from slipstream.dataset.transforms.libraries import call_image_transform
from slipstream.dataset.transforms.pipeline import check_transforms
from slipstream.errors import ConfigError, DataError
from slipstream.logging import print_log
from slipstream.model.tasks import main_output
from slipstream.registry import TRANSFORMS
from slipstream.zoo.predictions import (
    ClassificationPrediction,
    ImageClassificationPrediction,
    ImagePrediction,
    ImageSegmentationPrediction,
    ImagesPredictions,
    SegmentationPrediction,
)

RGB = NDArray[np.uint8]
_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DEFAULT: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "classification": ({"type": "ToTensor"}, {"type": "Normalize", "mean": _MEAN, "std": _STD}),
    "segmentation": (
        {"type": "SegStandardize", "max_value": 255},
        {"type": "SegNormalize", "mean": _MEAN, "std": _STD},
    ),
}
# SuperGradients' image processing classes, and the transforms that replace them.
_PROCESSINGS: Mapping[str, Mapping[str, str]] = {
    "classification": {"StandardizeImage": "ToTensor", "NormalizeImage": "Normalize"},
    "segmentation": {
        "StandardizeImage": "SegStandardize",
        "NormalizeImage": "SegNormalize",
        "SegmentationRescale": "SegRescale",
        "SegmentationPadShortToCropSize": "SegPadShortToCropSize",
    },
}
# Arguments of a data preprocessor that do not change the image's pixels.
_PADDING = ("non_blocking", "pad_size_divisor", "pad_value")


@dataclass(frozen=True)
class Processing:
    """The transforms, class names and colors that `predict` uses.

    Attributes:
        class_names: names of the classes. Default: their ids.
        transforms: validation transforms, or None for the ImageNet normalization.
        palette: an RGB color for each class. Default: `default_palette`.
    """

    class_names: Sequence[str] | None = None
    transforms: Sequence[Any] | None = None
    palette: Sequence[Sequence[int]] | None = None

    @classmethod
    def read(cls, task: str, class_names: Sequence[str] | None, transforms: Any, palette: Any) -> Processing:
        """Return the validated parameters; see `Network.set_dataset_processing_params`.

        Raises:
            ConfigError: if the transforms are invalid.
        """
        if transforms is not None:
            transforms = _build_transforms(transforms, task)
            if task == "classification":
                read_transforms(transforms)
            else:
                check_transforms(transforms)
        names = None if class_names is None else tuple(class_names)
        return cls(names, transforms, palette)


def stored_processing(meta: Any, task: str) -> Processing | None:
    """Return the classes and validation transforms from a checkpoint's `meta` entry.

    The result is None if either is missing, or if the stored configuration is invalid or contains Python objects.

    The transforms include the normalization of the data preprocessor. If the data preprocessor changes the images in
    any other way, the result has no transforms, and `predict` logs a warning. The stored configuration is read as plain
    data: nothing is imported, and no environment variables are read.
    """
    data = meta.get("dataset_meta") if isinstance(meta, Mapping) else None
    if not isinstance(data, Mapping) or not data.get("classes"):
        return None
    try:
        cfg = stored_config(meta)
        dataset_transforms, normalization = validation_transforms(cfg), _preprocessing(cfg, task)
        if dataset_transforms is None:
            return None
        transforms = None if normalization is None else [*dataset_transforms, *normalization]
        return Processing.read(task, data["classes"], transforms, data.get("palette"))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None  # the configuration contains Python objects, or it is not a recipe


def _preprocessing(cfg: Mapping[str, Any], task: str) -> Sequence[Mapping[str, Any]] | None:
    """Return the transforms that replace a configuration's data preprocessor, or None if transforms cannot replace it.

    Padding is omitted, because the networks accept images of any size.
    """
    options = dict(cfg["model"].get("data_preprocessor") or cfg.get("data_preprocessor") or {})
    kind = options.pop("type", "BaseDataPreprocessor")
    mean, std = options.pop("mean", None), options.pop("std", None)
    changes = any(value for key, value in options.items() if key not in _PADDING)
    if kind not in ("BaseDataPreprocessor", "ImgDataPreprocessor") or changes:
        return None
    if mean is None:
        return ()
    mean, std = (values * 3 if len(values) == 1 else values for values in (mean, std))
    if task == "segmentation":
        # Like the data preprocessor, SegNormalize expects pixel values from 0 to 255.
        return ({"type": "SegNormalize", "mean": mean, "std": std},)
    mean, std = ([value / 255 for value in values] for values in (mean, std))
    return ({"type": "ToTensor"}, {"type": "Normalize", "mean": mean, "std": std})


def predict(
    network: nn.Module, images: Any, task: str, processing: Processing | None, batch_size: int, fp16: bool
) -> ImagePrediction | ImagesPredictions:
    """Return the predictions of a network; see `Network.predict`."""
    if processing is None or processing.transforms is None:
        print_log(
            "predict normalizes images as in the recipes for ImageNet and Cityscapes; for other data, call "
            "set_dataset_processing_params(class_names=[...], image_processor=[...])",
            "current",
            logging.WARNING,
        )
    is_list, pixels = _read_images(images)
    predictions = _predictions(network, pixels, task, processing or Processing(), batch_size, fp16)
    return ImagesPredictions(tuple(predictions)) if is_list else predictions[0]


def _read_images(images: Any) -> tuple[bool, list[RGB]]:
    """Return whether `images` is a folder or a list, and the pixels of each image."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        images = sorted(path for path in Path(images).iterdir() if path.suffix.lower() in _SUFFIXES)
        if not images:
            raise DataError("the folder contains no images")
    if isinstance(images, Iterable) and not isinstance(images, str | Tensor | np.ndarray):
        return True, [_pixels(image) for image in images]
    return False, [_pixels(images)]


def _pixels(image: Any) -> RGB:
    """Return an image as uint8 (H, W, 3)."""
    if isinstance(image, str | Path):
        return read_image(Path(image))
    if isinstance(image, Tensor) and image.ndim == 3:
        image = image.permute(1, 2, 0).cpu().numpy()
    array = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise DataError(
            "an image must be an array (H, W, 3) or (H, W) or a tensor (3, H, W) of dtype uint8, not "
            f"{array.shape} of dtype {array.dtype}"
        )
    return array


def _build_transforms(transforms: Any, task: str) -> list[Any]:
    """Build each entry that is a name, `{Name: {arguments}}` or a dict with a `type`, and keep the other entries.

    SuperGradients' `{ComposeProcessing: {processings: [...]}}` is a list, too, and its processing classes are replaced.
    """
    if isinstance(transforms, Mapping) and list(transforms) == ["ComposeProcessing"]:
        transforms = transforms["ComposeProcessing"]["processings"]
    if isinstance(transforms, str | Mapping) or not isinstance(transforms, Iterable):
        raise ConfigError(f"must be a list of transforms, not {transforms!r}", "image_processor")
    built = []
    for entry in transforms:
        cfg: Any = {"type": entry} if isinstance(entry, str) else entry
        if not isinstance(cfg, Mapping):
            built.append(entry)
            continue
        if "type" not in cfg and len(cfg) == 1:
            [(name, arguments)] = cfg.items()
            cfg = {"type": name, **(arguments or {})}
        cfg = {**cfg, "type": _PROCESSINGS[task].get(cfg["type"], cfg["type"])}
        if cfg["type"] == "ToTensor" and cfg.get("max_value") == 255:
            del cfg["max_value"]
        if cfg["type"] != "ImagePermute":  # images are always converted to (3, H, W)
            built.append(TRANSFORMS.build(cfg))
    return built


def _prepare(image: RGB, task: str, transforms: Sequence[Any]) -> PreparedImage:
    if task == "segmentation":
        return prepare_image(image, transforms)
    pixel_transforms, params = read_transforms(transforms)
    planes: Any = image.transpose(2, 0, 1)
    for transform in pixel_transforms:
        planes = call_image_transform(transform, planes, sample_rng(0))
    inputs = planes if isinstance(planes, Tensor) else torch.from_numpy(np.array(planes, order="C"))
    sample = {"inputs": inputs} if params is None else {"inputs": inputs, "device_params": params}
    return PreparedImage(sample, (0, 0, inputs.shape[-1], inputs.shape[-2]), image.shape[:2])


def _inputs(prepared: PreparedImage) -> Tensor:
    """Return the network's input for an image, a float32 tensor (3, H, W)."""
    batch = {key: value[None] for key, value in prepared.sample.items()}
    inputs: Tensor = apply_device_transforms(batch)["inputs"][0]
    return inputs.float()


@torch.no_grad()
def _predictions(
    network: nn.Module, images: Iterable[RGB], task: str, processing: Processing, batch_size: int, fp16: bool
) -> list[ImagePrediction]:
    """Return the prediction for each image.

    Consecutive images that have the same size after the transforms are batched together. The transformed images and the
    scores are released after each batch.
    """
    transforms = (
        _build_transforms(_DEFAULT[task], task) if processing.transforms is None else processing.transforms
    )
    prepared = ((image, _prepare(image, task, transforms)) for image in images)
    first, training = next(network.parameters()), network.training
    device = first.device
    predictions: list[ImagePrediction] = []
    network.eval()
    try:
        for _, same_size in groupby(prepared, key=lambda pair: pair[1].sample["inputs"].shape):
            while group := list(islice(same_size, batch_size)):
                batch = torch.stack([_inputs(item) for _, item in group]).to(device, first.dtype)
                with torch.autocast(device.type, torch.float16, enabled=fp16 and device.type != "cpu"):
                    outputs = main_output(network(batch))
                scores = outputs.float().cpu()
                predictions += [
                    _result(*pair, item_scores, processing)
                    for pair, item_scores in zip(group, scores, strict=True)
                ]
    finally:
        network.train(training)
    return predictions


def _result(image: RGB, prepared: PreparedImage, scores: Tensor, processing: Processing) -> ImagePrediction:
    height, width = image.shape[:2]
    # With a single channel, there are two classes; the channel contains the logits of the second class.
    binary = scores.ndim == 3 and len(scores) == 1
    count = 2 if binary else len(scores)
    names = _names(processing.class_names, count, binary)
    if scores.ndim == 1:
        probabilities = scores.softmax(0)
        label = int(probabilities.argmax())
        prediction = ClassificationPrediction(float(probabilities[label]), label, (height, width))
        return ImageClassificationPrediction(image, prediction, names)
    ids = (scores[0] > 0).long() if binary else scores.argmax(0)
    mask = prepared.resize_to_image(ids).numpy()
    palette = processing.palette or ()
    if len(palette) < count:
        palette = default_palette(min(count, 256))
    return ImageSegmentationPrediction(image, SegmentationPrediction(mask, (height, width)), names, palette)


def _names(class_names: Sequence[str] | None, count: int, binary: bool) -> tuple[str, ...]:
    if class_names is None:
        return tuple(str(index) for index in range(count))
    names = ("background", *class_names) if binary and len(class_names) == 1 else tuple(class_names)
    if len(names) < count:
        raise ConfigError(
            f"the network has {count} classes, but there are {len(names)} class names", "class_names"
        )
    return names
