"""Models for common tasks, built from a network, a loss and a data preprocessor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.losses import Outputs, Upsampled, exchange_low_resolution, full
from slipstream.model.base_model import BaseModel
from slipstream.registry import MODELS
from slipstream.typecheck import PositiveInt, check, short_repr

Configured = nn.Module | Mapping[str, Any]


class Task(BaseModel):
    """A network and a loss, built from modules or configurations."""

    num_classes: int | None = None
    """Number of classes in the dataset, if known; `check_classes` checks the network's outputs against this number."""
    _checked_labels = False

    def __init__(
        self, network: Configured, loss: Configured | None = None, data_preprocessor: Any = None
    ) -> None:
        super().__init__(data_preprocessor)
        loss = nn.CrossEntropyLoss() if loss is None else loss
        self.network: nn.Module = _built(network, "network")
        self.loss: nn.Module = _built(loss, "loss")

    def losses(self, outputs: Any, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the losses computed by the loss module.

        Raises:
            DataError: if there are no targets, or a target is not one of the network's classes. On an accelerator, only
                the first batch is checked.
        """
        if targets is None:
            raise DataError(
                "the batch has no 'targets', which the 'loss' mode requires; return them from the dataset"
            )
        if not torch.compiler.is_compiling() and not self._checked_labels:
            self._checked_labels = True
            _check_labels(self.loss, main_output(outputs), targets)
        try:
            loss = self.loss(outputs, targets if targets.is_floating_point() else targets.long())
        except IndexError as error:  # only on the CPU, because other devices run asynchronously
            if not str(error).startswith("Target "):
                raise
            raise _wrong_label(self.loss, main_output(outputs), str(error).rstrip(".")) from error
        return loss if isinstance(loss, dict) else {"loss": loss}

    def check_classes(self, scores: Any) -> None:
        """Check that the main output has one channel per class; for two classes, a single channel is also valid.

        Raises:
            ModelError: if the number of channels is different.
        """
        if self.num_classes is None or not isinstance(scores, Tensor | Upsampled):
            return
        channels = scores.shape[1]
        if channels != self.num_classes and (channels, self.num_classes) != (1, 2):
            raise ModelError(
                f"the network outputs {channels} classes, but the dataset has {self.num_classes}; set the network's "
                "num_classes (arch_params.num_classes in a recipe)"
            )


@MODELS.register_module()
class Segmentor(Task):
    """Semantic segmentation: `network` returns logits (N, classes, H, W), or a tuple of main and auxiliary logits.

    Args:
        network: a module, or its configuration.
        loss: `loss(outputs, targets)` returns a scalar or a dict of scalars; cross-entropy by default.
        data_preprocessor: usually `ImgDataPreprocessor`.
    """

    # Whether a subclass outside Slipstream defines a method that receives the network's outputs.
    _reads_outputs = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = (kind for kind in cls.__mro__ if not kind.__module__.startswith("slipstream."))
        cls._reads_outputs = any(not _READERS.isdisjoint(vars(kind)) for kind in own)

    def forward(self, inputs: Tensor, targets: Tensor | None = None, mode: str = "tensor") -> Any:
        """Return losses, `{"preds": (N, H, W) int64, "targets": ...}` or the network's output.

        For networks with one output channel, `preds` is 1 where the logit is at least 0, and `scores` (N, H, W)
        contains the logits.

        Args:
            inputs: float images (N, 3, H, W).
            targets: class ids (N, H, W) of any integer type.
            mode: `loss`, `predict` or `tensor`.
        """
        outputs = self.outputs(inputs, mode)
        self.check_classes(main_output(outputs))
        if mode == "loss":
            return self.losses(self.without_padding(outputs, inputs, targets), targets)
        return self.predictions(outputs, inputs, targets) if mode == "predict" else outputs

    def outputs(self, inputs: Tensor, mode: str) -> Any:
        """Return the network's outputs.

        They are `Upsampled` if network and loss support it, and only the methods of Slipstream's classes read them.
        """
        reads = mode == "tensor" or self._reads_outputs or not _READERS.isdisjoint(vars(self))
        if reads or not exchange_low_resolution(self.network, self.loss):
            return self.network(inputs)
        return self.network(inputs, upsample=False)

    def without_padding(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> Any:
        """Return the outputs without the padding that the preprocessor added to the images."""
        padded = targets is not None and self._padded(inputs, targets)
        return _cut(outputs, targets) if padded and targets is not None else outputs

    def predictions(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the class ids of the main output and, if there are targets, the targets.

        With targets, the logits are first resized or, for padded images, cropped to the size of the targets.
        """
        logits = main_output(outputs)
        if targets is None:
            return _class_ids(logits)
        if self._padded(inputs, targets):
            logits = _cut(_resized(logits, inputs), targets)
        else:
            logits = _resized(logits, targets)
        return {**_class_ids(logits), "targets": targets.long()}

    def _padded(self, inputs: Tensor, targets: Tensor) -> bool:
        """Return whether the preprocessor padded the images; it does not pad the targets."""
        divisor = getattr(self.data_preprocessor, "pad_size_divisor", 1)
        sizes = list(zip(inputs.shape[-2:], targets.shape[-2:], strict=True))
        return any(i != t for i, t in sizes) and all(i == math.ceil(t / divisor) * divisor for i, t in sizes)


# Methods of `Segmentor` that receive the network's outputs.
_READERS = {"check_classes", "losses", "loss_inputs", "without_padding", "predictions"}


def main_output(outputs: Any) -> Any:
    """Return the main output of a network: the first one, if the outputs are a (nested) tuple or list."""
    while isinstance(outputs, tuple | list):
        outputs = outputs[0]
    return outputs


def _class_ids(logits: Outputs) -> dict[str, Tensor]:
    """Return the class ids and, for an output with one channel, the scores (N, H, W)."""
    if logits.shape[1] > 1:
        return {"preds": logits.argmax(1)}
    scores = full(logits).squeeze(1)
    return {"preds": (scores >= 0).long(), "scores": scores}


def _resized(logits: Outputs, like: Tensor) -> Outputs:
    size = like.shape[-2:]
    return logits if logits.shape[-2:] == size else F.interpolate(full(logits), size, mode="bilinear")


def _cut(outputs: Any, targets: Tensor) -> Any:
    """Remove the padding at the right and bottom of every output."""
    if isinstance(outputs, tuple | list):
        return [_cut(output, targets) for output in outputs]
    height, width = targets.shape[-2:]
    return outputs.cut(height, width) if isinstance(outputs, Upsampled) else outputs[..., :height, :width]


@MODELS.register_module()
class Classifier(Task):
    """Image classification: `network` returns logits (N, classes).

    Args:
        network: a module, or its configuration.
        loss: `loss(logits, targets)` returns a scalar or a dict of scalars; cross-entropy by default.
        data_preprocessor: usually `ImgDataPreprocessor`.
    """

    def forward(self, inputs: Tensor, targets: Tensor | None = None, mode: str = "tensor") -> Any:
        """Return losses, `{"preds": logits (N, classes), "targets": (N,)}` or logits.

        Args:
            inputs: float images (N, C, H, W).
            targets: class ids (N,).
            mode: `loss`, `predict` or `tensor`.
        """
        logits: torch.Tensor = self.network(inputs)
        self.check_classes(logits)
        if mode == "loss":
            return self.losses(logits, targets)
        if mode == "predict":
            return {"preds": logits} if targets is None else {"preds": logits, "targets": targets}
        return logits


def _built(part: Any, kind: str) -> nn.Module:
    """Return a module, built if `part` is a configuration."""
    if not callable(part) and not isinstance(part, Mapping):
        raise ConfigError(f"must be a module or a dict with a 'type', not {short_repr(part)}", kind)
    return MODELS.build(part) if isinstance(part, Mapping) else part


def _check_labels(loss: nn.Module, scores: Any, targets: Tensor) -> None:
    """Raise a DataError if a target is neither one of the network's classes nor the ignored value.

    On an accelerator, an invalid target would terminate the process without an error that reports the value. This check
    causes a device synchronization, so `Task` checks only one batch. Losses other than `CrossEntropyLoss` and
    `NLLLoss` may interpret targets differently, so their targets are checked only if they set `takes_class_ids = True`.

    Args:
        loss: the loss module.
        scores: the network's main output, (N, classes, ...).
        targets: integer class ids, or class probabilities (not checked).
    """
    takes_ids = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or getattr(loss, "takes_class_ids", False)
    if not takes_ids or not isinstance(scores, Tensor | Upsampled) or scores.ndim < 2:
        return
    # Tensors without data, such as fake tensors, cannot be checked.
    if targets.is_floating_point() or type(targets) is not Tensor or targets.is_meta:
        return
    wrong = (targets < 0) | (targets >= scores.shape[1])
    wrong &= targets != getattr(loss, "ignore_index", -100)
    if wrong.any():
        values = torch.unique(targets[wrong])[:5].tolist()
        sample = int(wrong.nonzero()[0, 0])
        description = f"{', '.join(map(str, values))} (first in sample {sample} of the batch)"
        raise _wrong_label(loss, scores, description)


def _wrong_label(loss: nn.Module, scores: Outputs, description: str) -> DataError:
    """Return the error for targets that are not among the network's classes."""
    ignored = getattr(loss, "ignore_index", None)
    ignores = f", and the loss ignores {ignored}" if ignored is not None else ""
    return DataError(
        f"a target is not one of the network's classes: {description}; the classes are 0 to {scores.shape[1] - 1}"
        f"{ignores}. Increase num_classes, map the dataset's labels to the classes, or set the loss's ignore_index to "
        "the value used for targets without a class, including padded pixels (fill_mask of the padding transforms)"
    )


# ---- sliding windows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlidingWindow:
    """Size and stride of the windows; the defaults match SegFormer on Cityscapes (arXiv 2105.15203)."""

    crop_size: tuple[int, int] = (1024, 1024)
    """Width and height of a window, in pixels."""
    stride: tuple[int, int] = (768, 768)
    """Horizontal and vertical distance between windows, in pixels."""
    batch_size: int = 4
    """Number of windows in a batch, which limits the network's memory use."""

    def __post_init__(self) -> None:
        check(self.crop_size, tuple[PositiveInt, PositiveInt], "crop_size")
        check(self.stride, tuple[PositiveInt, PositiveInt], "stride")
        check(self.batch_size, PositiveInt, "batch_size")
        if any(step > size for step, size in zip(self.stride, self.crop_size, strict=True)):
            raise ConfigError(f"must not exceed crop_size {self.crop_size}, but is {self.stride}", "stride")


def slide(network: Callable[[Tensor], Any], images: Tensor, window: SlidingWindow) -> Tensor:
    """Return the logits (N, C, H, W) for images (N, 3, H, W), averaged over the windows that contain each pixel.

    The last window of a row or column ends at the edge of the image. Images smaller than a window are padded with
    zeros at the right and bottom. Logits are summed in at least float32 on the device of the images.

    Args:
        network: module that returns logits (n, C, h, w) for a batch of windows, or a tuple with the logits as its
            first element. Logits of a different size are resized to the window size.
        images: network inputs, already normalized.
        window: size and stride of the windows.

    Raises:
        DataError: if the logits do not have four dimensions.
    """
    (width, height), (step_x, step_y) = window.crop_size, window.stride
    size = images.shape[-2:]
    if (right := max(width - size[1], 0)) + (bottom := max(height - size[0], 0)):
        images = F.pad(images, (0, right, 0, bottom))
    tops, lefts = _starts(images.shape[-2], height, step_y), _starts(images.shape[-1], width, step_x)
    total: Tensor | None = None
    positions = list(product(range(len(images)), tops, lefts))
    for first in range(0, len(positions), window.batch_size):
        chunk = positions[first : first + window.batch_size]
        crops = torch.stack([images[n, :, y : y + height, x : x + width] for n, y, x in chunk])
        logits = _logits(network(crops), (height, width))
        if total is None:
            shape = (len(images), logits.shape[1], *images.shape[-2:])
            total = logits.new_zeros(shape, dtype=torch.promote_types(logits.dtype, torch.float32))
        for (n, y, x), part in zip(chunk, logits, strict=True):
            total[n, :, y : y + height, x : x + width] += part
    if total is None:
        raise DataError("the batch contains no images; check the dataset and collate_fn")
    rows, columns = _coverage(total[0, 0, :, 0], tops, height), _coverage(total[0, 0, 0], lefts, width)
    return (total / (rows[:, None] * columns))[..., : size[0], : size[1]]


def _starts(length: int, window: int, stride: int) -> list[int]:
    return [*range(0, length - window, stride), length - window]


def _coverage(line: Tensor, starts: list[int], window: int) -> Tensor:
    """Return the number of windows that contain each position of a row or column."""
    counts = torch.zeros_like(line)
    for start in starts:
        counts[start : start + window] += 1
    return counts


def _logits(outputs: Any, size: tuple[int, int]) -> Tensor:
    logits = main_output(outputs)
    if logits.ndim != 4:
        raise DataError(
            f"sliding windows require logits (n, classes, h, w), but the network returned {tuple(logits.shape)}"
        )
    return logits if logits.shape[-2:] == size else F.interpolate(logits, size, mode="bilinear")
