"""Convert values for the backends: numbers, JSON, configurations and images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import DataError
from slipstream.redaction import redact

if TYPE_CHECKING:
    import numpy.typing as npt


def scalars_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in `values` as floats, including 0-dim arrays and tensors."""
    plain = {name: _plain(value) for name, value in values.items()}
    return {name: float(value) for name, value in plain.items() if isinstance(value, int | float)}


def as_json(values: Mapping[str, Any]) -> str:
    """Return one line of JSON. NaN and infinity are converted to null, because JSON does not support them."""
    return json.dumps(_finite(values), allow_nan=False)


def as_dict(config: Any) -> dict[str, Any]:
    """Return a `Config` (or any object with `to_dict`) or a mapping as a dict, without secrets."""
    if hasattr(config, "redacted"):
        return dict(config.redacted())
    return redact(dict(config.to_dict() if hasattr(config, "to_dict") else config))


def as_text(config: Any) -> str:
    """Return a `Config`'s `pretty_text`, or a mapping in the same Python syntax, without secrets."""
    if hasattr(config, "pretty_text"):
        return str(config.pretty_text)
    return "\n".join(f"{key} = {value!r}" for key, value in as_dict(config).items())


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their dotted paths (`hooks.0.type`)."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        yield path, tree
        return
    for key, value in items:
        yield from flatten(value, f"{path}.{key}" if path else str(key))


def check_image(name: str, image: Any) -> npt.NDArray[np.uint8]:
    """Check that `image` is an RGB image, and return it unchanged.

    Raises:
        DataError: if `image` is not a uint8 array of shape (H, W, 3).
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        return image
    actual = f"{image.dtype} {tuple(image.shape)}" if hasattr(image, "dtype") else type(image).__name__
    raise DataError(
        f"the image '{name}' must be a uint8 NumPy array of shape (H, W, 3) in RGB order, not {actual}"
    )


def _plain(value: Any) -> Any:
    """Convert arrays and tensors to Python numbers or lists of numbers; return other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _finite(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
