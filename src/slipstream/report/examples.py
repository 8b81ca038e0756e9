"""The section with example predictions of a classifier."""

from __future__ import annotations

import base64
import binascii
from html import escape

from slipstream.report.record import PNG_SIGNATURE, Example

__all__ = ["examples_section"]


def examples_section(examples: list[Example]) -> str:
    """Return HTML with the images, labels, predictions and probabilities, or an empty string if there are no images."""
    items = "".join(_item(each) for each in examples)
    if not items:
        return ""
    return (
        f'<ul class="examples">{items}</ul><p class="note">Samples from batches that are spread across '
        "the data of the last validation run: first the errors, in order of decreasing probability, then the correct "
        "predictions with the lowest probability. The images show the inputs before data preprocessing; the "
        "brightness of inputs that are not 8-bit images is scaled.</p>"
    )


def _item(example: Example) -> str:
    if not _is_png(example.picture):
        return ""
    wrong = example.label != example.prediction
    probability = "" if example.probability is None else f" {example.probability:.0%}"
    mark = "wrong" if wrong else "correct"
    alt = f"{mark}: predicted {example.prediction}, label {example.label}"
    return (
        f'<li class="{mark}"><img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{example.picture}">'
        f"<b>{'✗' if wrong else '✓'} {escape(example.prediction)}{probability}</b>"
        f"<small>label: {escape(example.label)}</small></li>"
    )


def _is_png(picture: str) -> bool:
    try:
        return base64.b64decode(picture, validate=True).startswith(PNG_SIGNATURE)
    except (binascii.Error, ValueError):
        return False
