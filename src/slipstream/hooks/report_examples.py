"""Select validation samples of a classifier for the report, and convert them to pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import DataError
from slipstream.evaluator.metric import read_tensors
from slipstream.report.record import Example

__all__ = ["ExampleSelection"]

_MAX_EXAMPLES = 12
_MAX_BATCHES = 32  # read in one validation run, because reading a batch causes a device synchronization
_MAX_SIDE = 112  # pixels


class _Candidate(NamedTuple):
    image: Tensor
    label: int
    prediction: int
    probability: float | None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: errors by decreasing confidence, then correct predictions by increasing confidence."""
        confidence = self.probability or 0.0
        correct = self.label == self.prediction
        return correct, confidence if correct else -confidence


class ExampleSelection:
    """The validation samples to show in the report: confident errors, then uncertain correct predictions.

    Args:
        batches: number of validation batches; None if unknown, in which case the first batches are read.
    """

    def __init__(self, batches: int | None) -> None:
        self._interval = max(1, -(-(batches or 0) // _MAX_BATCHES))
        self._selected: list[_Candidate] = []

    def add(self, index: int, batch: Any, outputs: Any) -> None:
        """Add the samples of a batch to the candidates if the batch and the outputs come from a classifier."""
        if index % self._interval or index >= _MAX_BATCHES * self._interval:
            return
        try:
            images = list(batch["inputs"] if isinstance(batch, Mapping) else batch[0])
            scores, targets = read_tensors(outputs, "ReportHook")
        except (DataError, TypeError, LookupError):
            return
        if targets.ndim != 1 or len(images) != len(targets) or not all(map(_is_image, images)):
            return
        predictions = _predictions(scores, targets)
        if predictions is None:
            return
        new = map(_Candidate, images, targets.tolist(), *predictions)
        best = sorted([*self._selected, *new], key=lambda candidate: candidate.rank)[:_MAX_EXAMPLES]
        # Copy the sample, because a view would keep the whole batch in memory.
        self._selected = [each._replace(image=_resize(each.image)) for each in best]

    def examples(self, names: Sequence[str]) -> list[Example]:
        """Return the selected samples, or an empty list without Pillow; `names` contains the known class names."""
        try:
            from PIL import Image
        except ImportError:
            return []

        def name(index: int) -> str:
            return names[index] if 0 <= index < len(names) else str(index)

        examples = []
        for image, label, prediction, probability in self._selected:
            file = io.BytesIO()
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "png")
            picture = base64.b64encode(file.getvalue()).decode("ascii")
            examples.append(Example(name(label), name(prediction), probability, picture))
        return examples


def _is_image(image: Any) -> bool:
    if not isinstance(image, Tensor) or image.ndim != 3 or not image.numel():
        return False
    return image.shape[0] in (1, 3) and (image.is_floating_point() or image.dtype == torch.uint8)


def _predictions(scores: Tensor, targets: Tensor) -> tuple[list[int], list[float | None]] | None:
    """Return the predicted classes and their probabilities; None if `scores` do not come from a classifier."""
    if scores.shape == targets.shape and not scores.is_floating_point():
        return scores.tolist(), [None] * len(targets)
    if (
        scores.ndim != 2
        or len(scores) != len(targets)
        or not scores.numel()
        or not scores.is_floating_point()
    ):
        return None
    values = scores.float()
    sums = values.sum(1)
    if not ((values >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        values = values.softmax(1)  # logits or log probabilities
    highest, classes = values.max(1)
    return classes.tolist(), [
        value if 0 <= value <= 1 else None for value in highest.tolist()
    ]  # excludes NaN


def _resize(image: Tensor) -> Tensor:
    """Return an RGB image as uint8 values on the host, at most `_MAX_SIDE` pixels high and wide."""
    pixels = image.detach().to("cpu", torch.float32, copy=True).expand(3, -1, -1)
    if image.dtype != torch.uint8:
        low, high = pixels.nan_to_num(0.0, 0.0, 0.0).aminmax()
        pixels = (pixels - low) * (255 / (high - low).clamp(min=1e-12))
    if (longest := max(image.shape[1:])) > _MAX_SIDE:
        size = [max(1, round(side * _MAX_SIDE / longest)) for side in image.shape[1:]]
        pixels = F.interpolate(pixels[None], size, mode="area")[0]
    return pixels.nan_to_num(0.0).round().clamp(0, 255).to(torch.uint8)
