"""Decode image and mask files, and images in memory."""

from __future__ import annotations

import functools
import importlib.util
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError
from slipstream.extras import extra

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFile import ImageFile

__all__ = ["MAX_PIXELS", "ImageBytes", "check_readable", "open_image", "read_image", "read_mask"]

MAX_PIXELS = 178_956_970
"""Default maximum number of pixels in a file. Pillow raises an error above the same limit.

Even a small file can decode to a huge image.
"""
_GRAY, _RGB = 0, 2  # PNG color types
_JPEG = b"\xff\xd8\xff"  # the first bytes of a JPEG file
_ORIENTATION = 0x0112  # EXIF tag
_TRANSPOSITIONS = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
"""Pillow's operations for the EXIF orientations 2 to 8."""
_METADATA = (
    b"Raw profile type exif",
    b"XML:com.adobe.xmp",
)  # PNG text chunks that may contain an orientation


@dataclass(frozen=True)
class ImageBytes:
    """An encoded image in memory, with its name for error messages."""

    name: str
    data: bytes

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return the contents as a file object."""
        return io.BytesIO(self.data)

    def __str__(self) -> str:
        return self.name


def read_image(path: Path | ImageBytes, max_pixels: int | None = MAX_PIXELS) -> NDArray[np.uint8]:
    """Return an image as uint8 (H, W, 3) RGB, in the orientation that its EXIF metadata specifies.

    Plain RGB PNGs (8 bits per channel, no transparency, no animation, no orientation) are decoded with pywuffs if it is
    installed (the `png` extra); pywuffs is three times as fast as Pillow. Other files, and files in which pywuffs finds
    an error, are decoded with Pillow. Pixels and errors are the same, except that pywuffs ignores broken metadata, such
    as a color profile. For color images with more than 8 bits per channel, only the high bytes are used.

    RGB and grayscale JPEGs that are not rotated are decoded with simplejpeg if it is installed (the `jpeg` extra).
    Pixels and errors are the same as with Pillow.

    Raises:
        DataError: the file cannot be read, has more than `max_pixels` pixels (None means no limit), or is a grayscale
            image with more than 8 bits per pixel.
    """
    pixels = _decode_plain_png(path, max_pixels, _RGB)
    if pixels is None:
        pixels = _decode_plain_jpeg(path, max_pixels)
    if pixels is not None:
        return pixels
    image, _ = _decode_with_pillow(path, max_pixels)
    if image.mode[0] in "IF":  # converting these to RGB would clip the values instead of scaling them
        raise DataError(f"the image '{path}' has mode {image.mode}; convert it to 8 bits per channel")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def read_mask(path: Path | ImageBytes, max_pixels: int | None = MAX_PIXELS) -> NDArray[np.uint8]:
    """Return the pixel values of a single-channel 8-bit file (grayscale or palette) as uint8 (H, W).

    The mask is oriented as in `read_image`. Plain grayscale PNGs are decoded with pywuffs if it is installed; other
    files are decoded with Pillow.

    Raises:
        DataError: the file cannot be read, has more than `max_pixels` pixels (None means no limit), or is not a
            single-channel 8-bit file.
    """
    pixels = _decode_plain_png(path, max_pixels, _GRAY)
    if pixels is not None:
        return pixels[..., 0]
    image, codecs = _decode_with_pillow(path, max_pixels)
    if image.mode not in ("L", "P"):
        raise DataError(
            f"the mask '{path}' has mode {image.mode}; its pixels must be class ids in one 8-bit channel "
            "(Pillow mode 'L' or 'P'). Convert colors to class ids, and 16-bit pixels to 8 bits, before training"
        )
    if _is_scaled(codecs):
        raise DataError(
            f"the mask '{path}' has gray values with fewer than 8 bits per pixel, which decoders scale to the range 0 "
            "to 255, so they are not class ids. Save it with 8 bits per pixel or with a palette"
        )
    return np.asarray(image)


def check_readable(path: Path, max_pixels: int | None = MAX_PIXELS) -> None:
    """Raise a DataError if the file cannot be decoded as an image of any mode or has more than `max_pixels` pixels."""
    if (
        _decode_plain_png(path, max_pixels, _GRAY, _RGB) is None
        and _decode_plain_jpeg(path, max_pixels) is None
    ):
        _decode_with_pillow(path, max_pixels)


@contextmanager
def open_image(path: Path | ImageBytes, max_pixels: int | None = MAX_PIXELS) -> Iterator[ImageFile]:
    """Open an image with Pillow, which loads the pixels lazily.

    If `max_pixels` exceeds Pillow's own limit, Pillow's limit is raised for the whole process.

    Raises:
        DataError: the file has more than `max_pixels` pixels.
    """
    with extra("images"):
        from PIL import Image

    if Image.MAX_IMAGE_PIXELS is not None and (max_pixels is None or max_pixels > 2 * Image.MAX_IMAGE_PIXELS):
        Image.MAX_IMAGE_PIXELS = max_pixels
    remedy = "resize it, or raise max_pixels if you trust the file"
    try:
        with Image.open(path if isinstance(path, Path) else path.open()) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise DataError(
                    f"'{path}' has {image.width} x {image.height} pixels, more than max_pixels={max_pixels:,}; {remedy}"
                )
            yield image
    except Image.DecompressionBombError as error:
        raise DataError(f"cannot read '{path}': {error}; {remedy}") from error


def _decode_plain_png(
    path: Path | ImageBytes, max_pixels: int | None, *kinds: int
) -> NDArray[np.uint8] | None:
    """Return the pixels of a plain PNG with one of these color types, uint8 (H, W, 1 or 3), or None for other files.

    The result is also None if pywuffs is not installed or finds an error; Pillow then decodes the file or
    reports the error.
    """
    formats = _formats()
    if formats is None:
        return None
    try:
        with path.open("rb") as file:
            header = file.read(29)
            if not _is_plain(header, max_pixels, kinds):
                return None
            file.seek(0)
            data = file.read()
    except OSError:
        return None
    if not {b"tRNS", b"acTL", b"eXIf", *_METADATA}.isdisjoint(_chunks(data)):
        return None
    from pywuffs.aux import ImageDecoder

    result = ImageDecoder(formats[header[25]]).decode(data)
    return None if result.error_message else result.pixbuf


@functools.cache
def _formats() -> dict[int, Any] | None:
    """Return the pywuffs settings for each color type, or None if pywuffs is not installed."""
    if importlib.util.find_spec("pywuffs") is None:
        return None
    from pywuffs import ImageDecoderQuirks, ImageDecoderType, PixelFormat
    from pywuffs.aux import ImageDecoderConfig

    configs = {}
    for kind, pixel_format in ((_GRAY, PixelFormat.Y), (_RGB, PixelFormat.RGB)):
        configs[kind] = ImageDecoderConfig()
        configs[kind].enabled_decoders = [ImageDecoderType.PNG]
        configs[kind].pixel_format = pixel_format
        configs[kind].quirks = {ImageDecoderQuirks.IGNORE_CHECKSUM: 0}  # the default is to ignore checksums
    return configs


def _is_plain(start: bytes, max_pixels: int | None, kinds: tuple[int, ...]) -> bool:
    """Return whether a file begins like an 8-bit PNG with one of these color types and is within the pixel limits."""
    if start[:8] != b"\x89PNG\r\n\x1a\n" or start[12:16] != b"IHDR" or len(start) < 29:
        return False
    width, height = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    with extra("images"):
        from PIL import Image

    # Above Pillow's limit, Pillow warns or raises a decompression bomb error.
    limits = [limit for limit in (max_pixels, Image.MAX_IMAGE_PIXELS) if limit is not None]
    return start[24] == 8 and start[25] in kinds and width * height <= min(limits, default=math.inf)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the type of each chunk of a PNG or, for a text chunk, its keyword. Metadata may follow the pixels."""
    position = 8
    while kind := data[position + 4 : position + 8]:
        text = kind in (b"tEXt", b"zTXt", b"iTXt")
        yield data[position + 8 : position + 88].partition(b"\0")[0] if text else kind
        position += 12 + int.from_bytes(data[position : position + 4], "big")


def _decode_plain_jpeg(path: Path | ImageBytes, max_pixels: int | None) -> NDArray[np.uint8] | None:
    """Return the pixels of an RGB or grayscale JPEG that is not rotated, uint8 (H, W, 3), or None for other files.

    Pillow reads the header and checks the size. The result is also None if simplejpeg cannot replace Pillow's decoder
    or finds an error; Pillow then decodes the file or reports the error.
    """
    decode = _jpeg_decoder()
    if decode is None:
        return None
    try:
        with path.open("rb") as file:
            if file.read(len(_JPEG)) != _JPEG:
                return None
            data = _JPEG + file.read()
        with open_image(path, max_pixels) as image:
            if image.format != "JPEG" or image.mode not in ("L", "RGB") or _orientation(image) is not None:
                return None
            # With a buffer, simplejpeg raises an error if it finds a larger size in the header than Pillow does.
            pixels = np.empty((image.height, image.width, 3), np.uint8)
        decoded: NDArray[np.uint8] = decode(data, "RGB", buffer=pixels, strict=True)
    except Exception:  # Pillow and simplejpeg raise many types of errors on broken files
        return None
    return decoded if decoded.shape == pixels.shape else None


@functools.cache
def _jpeg_decoder() -> Callable[..., Any] | None:
    """Return simplejpeg's decoder, or None if it is not installed or its pixels may differ from Pillow's.

    simplejpeg decodes with libjpeg-turbo 3. Pillow builds that use another library or an older version may return
    different pixels.
    """
    if importlib.util.find_spec("simplejpeg") is None:
        return None
    with extra("images"):
        from PIL import features

    version = features.version_feature("libjpeg_turbo")
    if version is None or int(version.split(".")[0]) < 3:
        return None
    from simplejpeg import decode_jpeg

    decoder: Callable[..., Any] = decode_jpeg
    return decoder


def _is_scaled(codecs: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether Pillow scaled the gray values.

    Pillow scales them for PNGs and TIFFs with 2 or 4 bits per pixel, and for PGMs whose maximum is not 255.
    """
    return any(
        "L;2" in codec or "L;4" in codec or (codec[0].startswith("ppm") and codec[2:] != (255,))
        for codec in codecs
    )


def _decode_with_pillow(
    path: Path | ImageBytes, max_pixels: int | None
) -> tuple[Image.Image, list[tuple[Any, ...]]]:
    """Return the loaded, oriented image, and the Pillow codecs that decoded it, with their arguments."""
    try:
        with open_image(path, max_pixels) as image:
            codecs = [
                (codec, *(args if isinstance(args, tuple) else (args,))) for codec, _, _, args in image.tile
            ]
            if image.format == "TIFF":
                # Prevent Pillow from memory-mapping the file with the rotated size, which would scramble the pixels.
                image.filename = ""
            image.load()
            return _apply_orientation(image), codecs
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types of errors on broken files
        raise DataError(f"cannot read '{path}': {error}") from error


def _apply_orientation(image: Image.Image) -> Image.Image:
    """Return the image as viewers display it. Cameras store the pixels in sensor order."""
    from PIL import Image

    orientation = _orientation(image)
    return (
        image if orientation is None else image.transpose(Image.Transpose[_TRANSPOSITIONS[orientation - 2]])
    )


def _orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation, 2 to 8, or None if the pixels are stored as they are displayed."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # viewers also ignore damaged metadata; Pillow raises many types of errors
        return None
    return orientation if orientation in range(2, 9) else None
