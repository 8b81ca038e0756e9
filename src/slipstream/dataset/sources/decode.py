"""Decode image and mask files, and images in memory."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError
from slipstream.extras import extra, is_installed

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFile import ImageFile

# Default maximum number of pixels in a file. Pillow raises an error above the same limit.
#
# Even a small file can decode to a huge image.
MAX_PIXELS = 178_956_970
# Pillow's other decoders are not used, because an image file may come from an untrusted source.
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION = 0x0112  # EXIF tag
# Pillow's operations for the EXIF orientations 2 to 8.
_TRANSPOSITIONS = (
    "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90",
)  # fmt: skip
# Names of PNG chunks that may change the pixels: orientation, transparency and animation.
_PNG_METADATA = (b"eXIf", b"tRNS", b"acTL", b"Raw profile type exif", b"XML:com.adobe.xmp")


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

    RGB PNGs and JPEGs that are not rotated are decoded with imagecodecs and simplejpeg, which are faster than Pillow,
    if they are installed (the extras `png` and `jpeg`). Pillow decodes all other files, and files in which these
    decoders find an error. Pixels and errors are the same. For color images with more than 8 bits per channel, only the
    high bytes are used.

    Raises:
        DataError: the file cannot be read, has more than `max_pixels` pixels (None means no limit), or is a grayscale
            image with more than 8 bits per pixel.
    """
    pixels = _decode_fast(path, max_pixels, "RGB")
    if pixels is not None:
        return pixels
    image, _ = _decode_with_pillow(path, max_pixels)
    if image.mode[0] in "IF":  # converting these to RGB would clip the values instead of scaling them
        raise DataError(f"the image '{path}' has mode {image.mode}; convert it to 8 bits per channel")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def read_mask(path: Path | ImageBytes, max_pixels: int | None = MAX_PIXELS) -> NDArray[np.uint8]:
    """Return the pixel values of a single-channel 8-bit file (grayscale or palette) as uint8 (H, W).

    The mask is oriented and decoded as in `read_image`.

    Raises:
        DataError: the file cannot be read, has more than `max_pixels` pixels (None means no limit), or is not a
            single-channel 8-bit file.
    """
    pixels = _decode_fast(path, max_pixels, "L")
    if pixels is not None:
        return pixels
    image, codecs = _decode_with_pillow(path, max_pixels)
    if image.mode not in ("L", "P"):
        raise DataError(
            f"the mask '{path}' has mode {image.mode}; convert it to class ids in one 8-bit channel"
        )
    # Pillow scales the values of PNGs and TIFFs with 2 or 4 bits per pixel, and of PGMs whose maximum is not 255.
    if any("L;2" in c or "L;4" in c or (c[0].startswith("ppm") and c[2:] != (255,)) for c in codecs):
        raise DataError(
            f"the mask '{path}' has fewer than 8 bits per pixel, which decoders scale to 0..255, so they are not class "
            "ids. Save it with 8 bits per pixel or with a palette"
        )
    return np.asarray(image)


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
        with Image.open(path if isinstance(path, Path) else path.open(), formats=_FORMATS) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise DataError(
                    f"'{path}' has {image.width} x {image.height} pixels, more than max_pixels={max_pixels:,}; {remedy}"
                )
            yield image
    except Image.DecompressionBombError as error:
        raise DataError(f"cannot read '{path}': {error}; {remedy}") from error


def _decode_fast(path: Path | ImageBytes, max_pixels: int | None, mode: str) -> NDArray[np.uint8] | None:
    """Return the pixels of a plain PNG or JPEG file, or None if Pillow must decode the file or report an error.

    Pillow reads the header and checks the size. The file must have 8 bits per channel and must not be rotated.
    """
    formats = _fast_formats()
    if not formats:
        return None
    try:
        with path.open("rb") as file:
            data = file.read()
        with open_image(ImageBytes(str(path), data), max_pixels) as image:
            decode, kind = formats.get(image.format or ""), (image.format, image.mode, mode)
            supported = kind in (("PNG", mode, mode), ("JPEG", "RGB", "RGB"), ("JPEG", "L", "RGB"))
            # Pillow converts other depths, such as 4 or 16 bits per channel.
            converted = any(";" in str(args) for _, _, _, args in image.tile)
            if decode is None or not supported or converted:
                return None
            # For a PNG, Pillow decodes the pixels to find the orientation; its decoder checks the metadata.
            if image.format == "JPEG" and _orientation(image) is not None:
                return None
            shape = (image.height, image.width, 3) if mode == "RGB" else (image.height, image.width)
        pixels: NDArray[np.uint8] | None = decode(data, shape)
    except Exception:  # the decoders raise many types of errors on broken files
        return None
    return pixels if pixels is not None and pixels.shape == shape and pixels.dtype == np.uint8 else None


@functools.cache
def _fast_formats() -> dict[str, Callable[[bytes, tuple[int, ...]], Any]]:
    """Return the installed decoders for each Pillow format.

    simplejpeg decodes with libjpeg-turbo 3. Pillow builds that use another library or an older version may return
    different pixels, so simplejpeg is then not used.
    """
    with extra("images"):
        from PIL import features

    formats: dict[str, Callable[[bytes, tuple[int, ...]], Any]] = {}
    if is_installed("imagecodecs"):
        from imagecodecs import spng_decode

        formats["PNG"] = lambda data, shape: (
            None if any(name in data for name in _PNG_METADATA) else spng_decode(data)
        )
    turbo = features.version_feature("libjpeg_turbo")
    if is_installed("simplejpeg") and turbo is not None and int(turbo.split(".")[0]) >= 3:
        from simplejpeg import decode_jpeg

        # With a buffer, simplejpeg raises an error if it finds a larger size in the header than Pillow does.
        formats["JPEG"] = lambda data, shape: decode_jpeg(
            data, "RGB", buffer=np.empty(shape, np.uint8), strict=True
        )
    return formats


def _decode_with_pillow(
    path: Path | ImageBytes, max_pixels: int | None
) -> tuple[Image.Image, Sequence[tuple[Any, ...]]]:
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
            orientation = _orientation(image)
            if orientation is None:
                return image, codecs
            from PIL import Image

            return image.transpose(Image.Transpose[_TRANSPOSITIONS[orientation - 2]]), codecs
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types of errors on broken files
        raise DataError(f"cannot read '{path}': {error}") from error


def _orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation, 2 to 8, or None if the pixels are stored as they are displayed."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # viewers also ignore damaged metadata; Pillow raises many types of errors
        return None
    return orientation if orientation in range(2, 9) else None
