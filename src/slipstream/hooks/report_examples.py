"""Select validation samples of a classifier for the report, and convert them to pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import DataError
from slipstream.evaluator.samples import read_tensors
from slipstream.report.record import PNG_SIGNATURE, Example

__all__ = ["ExampleSelection"]

_MAX_EXAMPLES = 12
_MAX_BATCHES = 32
"""Maximum number of batches to read in one validation run. Reading a batch causes a device synchronization."""
_MAX_SIDE = 112
"""Maximum height and width of a picture, in pixels."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    image: Tensor
    label: int
    prediction: int
    probability: float | None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: errors by decreasing confidence, then correct predictions by increasing confidence."""
        confidence = 0.0 if self.probability is None else self.probability
        correct = self.label == self.prediction
        return correct, confidence if correct else -confidence


class ExampleSelection:
    """The validation samples to show in the report: confident errors, then uncertain correct predictions.

    Args:
        batches: number of validation batches; None if unknown, in which case the first batches are read.
    """

    def __init__(self, batches: int | None) -> None:
        self._batch_interval = max(1, -(-(batches or 0) // _MAX_BATCHES))
        self._selected: list[_Candidate] = []

    def add(self, index: int, batch: Any, outputs: Any) -> None:
        """Add the samples of a batch to the candidates if the batch and the outputs come from a classifier."""
        if index % self._batch_interval or index >= _MAX_BATCHES * self._batch_interval:
            return
        images = _images(batch)
        try:
            scores, targets = read_tensors(outputs, "ReportHook")
        except DataError:
            return
        if images is None or targets.ndim != 1 or len(images) != len(targets) or not len(targets):
            return
        predictions = _predictions(scores, targets)
        if predictions is None:
            return
        classes, probabilities = predictions
        new = [
            _Candidate(image, label, prediction, probability)
            for image, label, prediction, probability in zip(
                images, targets.tolist(), classes, probabilities, strict=True
            )
        ]
        best = sorted([*self._selected, *new], key=lambda candidate: candidate.rank)[:_MAX_EXAMPLES]
        # Copy the sample, because a view would keep the whole batch in memory.
        self._selected = [
            candidate if candidate in self._selected else _copy_resized(candidate) for candidate in best
        ]

    def examples(self, names: Sequence[str]) -> list[Example]:
        """Return the selected samples; `names` contains the class names, if they are known."""

        def name(index: int) -> str:
            return str(names[index]) if 0 <= index < len(names) else str(index)

        return [
            Example(
                name(candidate.label),
                name(candidate.prediction),
                candidate.probability,
                _png(candidate.image),
            )
            for candidate in self._selected
        ]


def _copy_resized(candidate: _Candidate) -> _Candidate:
    image = _resize(candidate.image.detach().to("cpu", copy=True))
    return _Candidate(image, candidate.label, candidate.prediction, candidate.probability)


def _images(batch: Any) -> Sequence[Tensor] | None:
    """Return the images (channels, height, width) of a batch, or None if its inputs are not 1- or 3-channel images."""
    inputs = batch.get("inputs") if isinstance(batch, Mapping) else None
    if isinstance(batch, list | tuple) and batch:
        inputs = batch[0]
    images = list(inputs) if isinstance(inputs, Tensor | list | tuple) else []
    if not images or not all(isinstance(image, Tensor) and _is_image(image) for image in images):
        return None
    return images


def _is_image(image: Tensor) -> bool:
    readable = image.is_floating_point() or image.dtype == torch.uint8
    return readable and image.ndim == 3 and image.shape[0] in (1, 3) and image.numel() > 0


def _predictions(scores: Tensor, targets: Tensor) -> tuple[list[int], list[float | None]] | None:
    """Return the predicted classes and their probabilities; None if `scores` do not come from a classifier."""
    if scores.shape == targets.shape and not scores.is_floating_point():
        return scores.tolist(), [None] * len(targets)
    if (
        scores.ndim != 2
        or len(scores) != len(targets)
        or not scores.is_floating_point()
        or not scores.shape[1]
    ):
        return None
    values = scores.float()
    sums = values.sum(1)
    if not ((values >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        values = values.softmax(1)  # logits or log probabilities
    highest, classes = values.max(1)
    known = [value if 0 <= value <= 1 else None for value in highest.tolist()]  # excludes NaN
    return classes.tolist(), known


def _resize(image: Tensor) -> Tensor:
    """Return an image as uint8 values, at most `_MAX_SIDE` pixels high and wide."""
    pixels = image.float()
    if image.dtype != torch.uint8:
        pixels = torch.nan_to_num(pixels, 0.0, 0.0, 0.0)
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) * (255 / (high - low).clamp(min=1e-12))
    if (longest := max(image.shape[1:])) > _MAX_SIDE:
        size = [max(1, round(side * _MAX_SIDE / longest)) for side in image.shape[1:]]
        pixels = F.interpolate(pixels[None], size, mode="area")[0]
    return pixels.round().clamp(0, 255).to(torch.uint8)


def _png(image: Tensor) -> str:
    """Return a uint8 image as a base64-encoded PNG file."""
    channels, height, width = image.shape
    rows = image.permute(1, 2, 0).reshape(height, width * channels)
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), rows], 1)  # PNG filter type 0 (none)
    color = 0 if channels == 1 else 2  # gray or RGB
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    body = (
        _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines.numpy().tobytes()))
        + _chunk(b"IEND", b"")
    )
    return base64.b64encode(PNG_SIGNATURE + body).decode("ascii")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
