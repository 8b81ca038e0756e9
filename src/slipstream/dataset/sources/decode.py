"""Decoding of image and mask files."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError
from slipstream.extras import extra

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["check_readable", "read_image", "read_mask"]

_GREY, _RGB = 0, 2  # colour types of PNG


def read_image(path: Path) -> NDArray[np.uint8]:
    """Return an image as uint8 (H, W, 3) RGB.

    Plain PNGs (8 bits per channel, no transparency, no animation) are decoded with pywuffs if it is installed (the
    extra `png`), in a third of the time that Pillow takes. Other files, and files in which pywuffs finds an error,
    are decoded with Pillow. Pixels and errors are the same, except that pywuffs ignores broken metadata, such as a
    colour profile. For colour images with more than 8 bits per channel, only the high bytes are used.

    Raises:
        DataError: The file cannot be read, or is a greyscale image with more than 8 bits per pixel.
    """
    pixels = _plain_png(path, _RGB)
    if pixels is not None:
        return pixels
    image, _ = _by_pillow(path)
    if image.mode[0] in "IF":  # converting these to RGB would clip, not scale
        raise DataError(f"the image '{path}' has mode {image.mode}; convert it to 8 bits per channel")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def read_mask(path: Path) -> NDArray[np.uint8]:
    """Return the values of an 8-bit file with one channel (greyscale or palette) as uint8 (H, W).

    The file is decoded as in `read_image`.

    Raises:
        DataError: The file cannot be read, or is not an 8-bit file with one channel.
    """
    pixels = _plain_png(path, _GREY)
    if pixels is not None:
        return pixels[..., 0]
    image, codecs = _by_pillow(path)
    if image.mode not in ("L", "P"):
        raise DataError(
            f"the mask '{path}' has mode {image.mode}; its pixels must be class ids in one 8-bit channel "
            "(Pillow mode 'L' or 'P'). Convert colours to class ids before training"
        )
    if _is_stretched(codecs):
        raise DataError(
            f"the mask '{path}' has grey values with fewer than 8 bits per pixel, which decoders scale to the range 0 "
            "to 255, so they are not class ids. Save it with 8 bits per pixel or with a palette"
        )
    return np.asarray(image)


def check_readable(path: Path) -> None:
    """Raise a DataError if the file cannot be decoded as an image of any mode."""
    if _plain_png(path, _GREY, _RGB) is None:
        _by_pillow(path)


def _plain_png(path: Path, *kinds: int) -> NDArray[np.uint8] | None:
    """Return the pixels of a plain PNG with one of these colour types, uint8 (H, W, 1 or 3), or None for other files.

    The result is also None if pywuffs is not installed or finds an error; Pillow then decodes the file or
    reports the error.
    """
    formats = _formats()
    if formats is None:
        return None
    try:
        with path.open("rb") as file:
            start = file.read(29)
            if not _is_plain(start, kinds):
                return None
            file.seek(0)
            data = file.read()
    except OSError:
        return None
    if not {b"tRNS", b"acTL"}.isdisjoint(_chunks_before_pixels(data)):
        return None
    from pywuffs.aux import ImageDecoder

    result = ImageDecoder(formats[start[25]]).decode(data)
    return None if result.error_message else result.pixbuf


@functools.cache
def _formats() -> dict[int, Any] | None:
    """Return the settings of pywuffs for each colour type, or None if it is not installed."""
    if importlib.util.find_spec("pywuffs") is None:
        return None
    from pywuffs import ImageDecoderQuirks, ImageDecoderType, PixelFormat
    from pywuffs.aux import ImageDecoderConfig

    configs = {}
    for kind, pixel_format in ((_GREY, PixelFormat.Y), (_RGB, PixelFormat.RGB)):
        configs[kind] = ImageDecoderConfig()
        configs[kind].enabled_decoders = [ImageDecoderType.PNG]
        configs[kind].pixel_format = pixel_format
        configs[kind].quirks = {ImageDecoderQuirks.IGNORE_CHECKSUM: 0}  # the default is to ignore checksums
    return configs


def _is_plain(start: bytes, kinds: tuple[int, ...]) -> bool:
    """Return whether a file starts like an 8-bit PNG with one of these colour types and does not exceed Pillow's pixel
    limit."""
    if start[:8] != b"\x89PNG\r\n\x1a\n" or start[12:16] != b"IHDR" or len(start) < 29:
        return False
    width, height = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    with extra("images"):
        from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS  # above it, Pillow warns or raises a decompression bomb error
    return start[24] == 8 and start[25] in kinds and (limit is None or width * height <= limit)


def _chunks_before_pixels(data: bytes) -> Iterator[bytes]:
    at = 8
    while (kind := data[at + 4 : at + 8]) not in (b"", b"IDAT"):
        yield kind
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _is_stretched(codecs: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether Pillow scales grey values: PNGs and TIFFs with 2 or 4 bits per pixel, and PGMs whose maximum is
    not 255."""
    return any(
        "L;2" in codec or "L;4" in codec or (codec[0].startswith("ppm") and codec[2:] != (255,))
        for codec in codecs
    )


def _by_pillow(path: Path) -> tuple[Image.Image, list[tuple[Any, ...]]]:
    """Return the loaded image, and the Pillow codecs that decoded it with their arguments."""
    with extra("images"):
        from PIL import Image

    try:
        with Image.open(path) as image:
            codecs = [
                (codec, *(args if isinstance(args, tuple) else (args,))) for codec, _, _, args in image.tile
            ]
            image.load()
            return image, codecs
    except Exception as error:  # Pillow's decoders raise many types of errors on broken files
        raise DataError(f"cannot read '{path}': {error}") from error
