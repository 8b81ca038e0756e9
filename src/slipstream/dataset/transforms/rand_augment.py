"""RandAugment (arXiv 1909.13719): random Pillow operations, configured by a string in the SuperGradients format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.extras import extra
from slipstream.registry import TRANSFORMS
from slipstream.typecheck import Probability, check

_MAX_MAGNITUDE = 10.0
# Probability of each operation with `w0`. Without `w0`, all operations have the same probability.
_WEIGHTS = {
    "Rotate": 0.3, "ShearX": 0.2, "ShearY": 0.2, "TranslateXRel": 0.1, "TranslateYRel": 0.1, "Color": 0.025,
    "Sharpness": 0.025, "AutoContrast": 0.025, "Solarize": 0.005, "SolarizeAdd": 0.005, "Contrast": 0.005,
    "Brightness": 0.005, "Equalize": 0.005, "Posterize": 0.0, "Invert": 0.0,
}  # fmt: skip
# Operations whose argument has a random sign, with the absolute value of the argument at maximum magnitude.
_SIGNED = {"Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3, "TranslateXRel": 0.45, "TranslateYRel": 0.45}
_ENHANCE = ("Color", "Contrast", "Brightness", "Sharpness")


@TRANSFORMS.register_module()
class RandAugmentTransform:
    """Apply n random operations, each with probability 0.5 and a magnitude from 0 to 10.

    Args:
        config_str: `rand`, followed by sections separated by `-`, such as `rand-m9-n3-mstd0.5`. `m` sets the magnitude
            (default: 10), `n` sets the number of operations (default: 2), `mstd` sets the standard deviation of the
            magnitude (default: 0; with `inf`, the magnitude is uniformly random between 0 and `m`), `inc1` makes every
            operation stronger as the magnitude increases, and `w0` selects fixed probabilities for the operations.
        crop_size: ignored; translations are relative to the image size.
        img_mean: color of the pixels outside the image, three numbers between 0 and 1.

    Raises:
        ConfigError: `config_str` or `img_mean` is invalid.
    """

    def __init__(
        self, config_str: str, crop_size: int = 224, img_mean: Sequence[float] = (0.5, 0.5, 0.5)
    ) -> None:
        check(img_mean, tuple[Probability, Probability, Probability], "img_mean")
        self.fill = tuple(min(255, round(255 * value)) for value in img_mean)
        sections = _sections(config_str)
        self.magnitude = float(sections.get("m", _MAX_MAGNITUDE))
        self.operations = int(sections.get("n", 2))
        self.deviation = float(sections.get("mstd", 0))
        self.increasing = "inc" in sections
        weights = np.array(list(_WEIGHTS.values()))
        self.weights = weights / weights.sum() if "w" in sections else None

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return the augmented image, uint8 (3, H, W)."""
        with extra("images"):
            from PIL import Image

        names, replace = list(_WEIGHTS), self.weights is None
        chosen = rng.choice(len(names), self.operations, replace=replace, p=self.weights)
        picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        for index in chosen:
            if rng.random() < 0.5:
                picture = self._apply(names[index], picture, self._draw_magnitude(rng), rng)
        return np.asarray(picture).transpose(2, 0, 1)

    def _draw_magnitude(self, rng: np.random.Generator) -> float:
        magnitude = self.magnitude
        if self.deviation == float("inf"):
            magnitude = rng.uniform(0, magnitude)
        elif self.deviation:
            magnitude = rng.normal(magnitude, self.deviation)
        return min(_MAX_MAGNITUDE, max(0.0, magnitude))

    def _apply(self, name: str, picture: Any, magnitude: float, rng: np.random.Generator) -> Any:
        from PIL import ImageEnhance

        strength = magnitude / _MAX_MAGNITUDE
        sign = -1 if rng.random() < 0.5 else 1
        if name in _SIGNED:
            return self._move(name, picture, sign * strength * _SIGNED[name])
        if name in _ENHANCE:
            factor = 1 + sign * 0.9 * strength if self.increasing else 0.1 + 1.8 * strength
            return getattr(ImageEnhance, name)(picture).enhance(factor)
        return _COLORS[name](picture, strength, self.increasing)

    def _move(self, name: str, picture: Any, value: float) -> Any:
        from PIL import Image

        bilinear = Image.Resampling.BILINEAR
        if name == "Rotate":
            return picture.rotate(value, bilinear, fillcolor=self.fill)
        matrix = {
            "ShearX": (1, value, 0, 0, 1, 0),
            "ShearY": (1, 0, 0, value, 1, 0),
            "TranslateXRel": (1, 0, value * picture.width, 0, 1, 0),
            "TranslateYRel": (1, 0, 0, 0, 1, value * picture.height),
        }[name]
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, bilinear, fillcolor=self.fill)


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a configuration string by name."""
    first, *rest = text.split("-")
    found = [re.fullmatch(r"(mstd|inc|m|n)(\d+(?:\.\d+)?|inf)|(w)(0)", section) for section in rest]
    if first != "rand" or None in found:
        raise ConfigError(
            f"must be 'rand' and sections such as m9, n3, mstd0.5, inc1, w0: '{text}'", "config_str"
        )
    return {match[1] or match[3]: match[2] or match[4] for match in found if match}


def _pillow(name: str) -> Callable[[Any, float, bool], Any]:
    """Return the function `name` of `PIL.ImageOps` as an operation without a strength."""

    def apply(picture: Any, strength: float, increasing: bool) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, name)(picture)

    return apply


def _posterize(picture: Any, strength: float, increasing: bool) -> Any:
    bits = int(strength * 4)
    mask = 256 - 2 ** (8 - (4 - bits if increasing else bits))
    return picture.point([value & mask for value in range(256)] * 3)


def _solarize(picture: Any, strength: float, increasing: bool) -> Any:
    from PIL import ImageOps

    threshold = int(strength * 256)
    return ImageOps.solarize(picture, 256 - threshold if increasing else threshold)


def _solarize_add(picture: Any, strength: float, increasing: bool) -> Any:
    added = int(strength * 110)
    return picture.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


_COLORS: Mapping[str, Callable[[Any, float, bool], Any]] = {
    **{name: _pillow(name.lower()) for name in ("AutoContrast", "Equalize", "Invert")},
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
}
