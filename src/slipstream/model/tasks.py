"""Models for common tasks, built from a network, a loss and a data preprocessor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.model.base_model import BaseModel
from slipstream.registry import MODELS
from slipstream.typecheck import short_repr

__all__ = ["Classifier", "Segmentor", "Task", "main_output"]

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
        if self.num_classes is None or not isinstance(scores, Tensor):
            return
        channels = scores.shape[1]
        if channels != self.num_classes and (channels, self.num_classes) != (1, 2):
            raise ModelError(
                f"the network outputs {channels} class{'es' * (channels != 1)}, but the dataset has "
                f"{self.num_classes}; set the network's num_classes (arch_params.num_classes in a recipe) to "
                f"{self.num_classes}"
            )


@MODELS.register_module()
class Segmentor(Task):
    """Semantic segmentation: `network` returns logits (N, classes, H, W), or a tuple of main and auxiliary logits.

    Args:
        network: a module, or its configuration.
        loss: `loss(outputs, targets)` returns a scalar or a dict of scalars; cross-entropy by default.
        data_preprocessor: usually `ImgDataPreprocessor`.
    """

    def forward(self, inputs: Tensor, targets: Tensor | None = None, mode: str = "tensor") -> Any:
        """Return losses, `{"preds": (N, H, W) int64, "targets": ...}` or the network's output.

        For networks with one output channel, `preds` is 1 where the logit is at least 0, and `scores` (N, H, W)
        contains the logits.

        Args:
            inputs: float images (N, 3, H, W).
            targets: class ids (N, H, W) of any integer type.
            mode: `loss`, `predict` or `tensor`.
        """
        outputs = self.network(inputs)
        self.check_classes(main_output(outputs))
        if mode == "loss":
            return self.losses(self.without_padding(outputs, inputs, targets), targets)
        return self.predictions(outputs, inputs, targets) if mode == "predict" else outputs

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


def main_output(outputs: Any) -> Tensor:
    """Return the main output of a network: the first tensor, if the outputs are a (nested) tuple or list."""
    while isinstance(outputs, tuple | list):
        outputs = outputs[0]
    output: Tensor = outputs
    return output


def _class_ids(logits: Tensor) -> dict[str, Tensor]:
    """Return the class ids and, for an output with one channel, the scores (N, H, W)."""
    if logits.shape[1] > 1:
        return {"preds": logits.argmax(1)}
    scores = logits.squeeze(1)
    return {"preds": (scores >= 0).long(), "scores": scores}


def _resized(logits: Tensor, like: Tensor) -> Tensor:
    size = like.shape[-2:]
    return logits if logits.shape[-2:] == size else F.interpolate(logits, size, mode="bilinear")


def _cut(outputs: Any, targets: Tensor) -> Any:
    """Remove the padding at the right and bottom of every output."""
    if isinstance(outputs, tuple | list):
        return [_cut(output, targets) for output in outputs]
    height, width = targets.shape[-2:]
    return outputs[..., :height, :width]


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
    built: nn.Module = MODELS.build(part) if isinstance(part, Mapping) else part
    return built


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
    if not takes_ids or not isinstance(scores, Tensor) or scores.ndim < 2:
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


def _wrong_label(loss: nn.Module, scores: Tensor, description: str) -> DataError:
    """Return the error for targets that are not among the network's classes."""
    ignored = getattr(loss, "ignore_index", None)
    ignores = f", and the loss ignores {ignored}" if ignored is not None else ""
    return DataError(
        f"a target is not one of the network's classes: {description}; the classes are 0 to {scores.shape[1] - 1}"
        f"{ignores}. Increase num_classes, map the dataset's labels to the classes, or set the loss's ignore_index to "
        "the value used for targets without a class, including padded pixels (fill_mask of the padding transforms)"
    )
