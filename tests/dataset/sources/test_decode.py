"""Tests of image decoding. Pixels and errors must be the same with imagecodecs as with Pillow."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from slipstream.dataset.sources import decode
from slipstream.dataset.sources.decode import read_image, read_mask
from slipstream.errors import DataError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAY, RGB = 0, 2
CHANNELS = {GRAY: 1, RGB: 3}


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(pixels, filters=(0,), level=6, extra=b"", size=None, pieces=1):
    """Encode a PNG. `filters` are used cyclically; `extra` contains chunks to insert before the pixel data."""
    height, width, channels = pixels.shape
    rows, before = [], np.zeros(width * channels, int)
    for y, row in enumerate(pixels.reshape(height, -1).astype(int)):
        kind = filters[y % len(filters)]
        rows.append(bytes([kind]) + predicted(kind, row, before, channels).astype(np.uint8).tobytes())
        before = row
    color = RGB if channels == 3 else GRAY
    header = struct.pack(">IIBBBBB", *(size or (width, height)), 8, color, 0, 0, 0)
    data = zlib.compress(b"".join(rows), level)
    step = -(-len(data) // pieces)
    idat = b"".join(chunk(b"IDAT", data[at : at + step]) for at in range(0, len(data), step))
    return SIGNATURE + chunk(b"IHDR", header) + extra + idat + chunk(b"IEND", b"")


def predicted(kind, row, above, channels):
    """Apply one of the five filters in the PNG specification to a row."""
    left, corner = (np.concatenate([np.zeros(channels, int), values[:-channels]]) for values in (row, above))
    near = np.stack([left, above, corner])
    paeth = np.take_along_axis(near, np.abs(near - (left + above - corner)).argmin(0)[None], 0)[0]
    return (row - [np.zeros_like(row), left, above, (left + above) // 2, paeth][kind]) % 256


def outcome(read, path):
    try:
        return read(path)
    except DataError as error:
        return str(error)


def by_pillow(read, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_decode_fast", lambda *_: None)
        return outcome(read, path)


def noise(width, height, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


SIDES, FILTERS = st.integers(1, 40), st.lists(st.integers(0, 4), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("decode") / "picture.png"


@given(SIDES, SIDES, st.sampled_from([GRAY, RGB]), FILTERS, st.sampled_from([0, 1, 9]), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_plain_pngs_are_decoded_to_their_pixels(file, width, height, color, filters, level, pieces):
    pixels = noise(width, height, CHANNELS[color])
    file.write_bytes(png(pixels, filters, level, pieces=pieces))
    if color == RGB:
        np.testing.assert_array_equal(read_image(file), pixels)
    else:
        np.testing.assert_array_equal(read_mask(file), pixels[..., 0])
        np.testing.assert_array_equal(read_image(file), np.repeat(pixels, 3, axis=2))


@pytest.mark.parametrize("color", [GRAY, RGB])
def test_imagecodecs_decodes_plain_pngs(file, color, monkeypatch):
    pytest.importorskip("imagecodecs")
    file.write_bytes(png(noise(9, 7, CHANNELS[color])))
    monkeypatch.setattr(decode, "_decode_with_pillow", None)
    (read_image if color == RGB else read_mask)(file)


@pytest.mark.parametrize("read", [read_image, read_mask])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("more", ["", "transparency", "interlace"])
def test_pixels_of_every_png_mode_match_pillow(file, mode, read, more):
    options = {more: {"RGB": (1, 2, 3)}.get(mode, 1)} if more and not mode.endswith("A") else {}
    picture = Image.fromarray(noise(12, 8, 3))
    picture = picture.convert("L").convert(mode) if mode == "I;16" else picture.convert(mode)
    picture.save(file, **options)
    np.testing.assert_array_equal(outcome(read, file), by_pillow(read, file))


def damaged(data, draw):
    """Return the data with a flipped bit, with bytes removed or duplicated, or truncated."""
    at, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 20))
    match draw(st.sampled_from(["bit", "cut", "double", "truncated"])):
        case "bit":
            return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        case "cut":
            return data[:at] + data[at + length :]
        case "double":
            return data[: at + length] + data[at:]
        case _:
            return data[:at]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_files_have_the_same_result_as_with_pillow(file, data):
    pytest.importorskip("imagecodecs")
    color = data.draw(st.sampled_from([GRAY, RGB]))
    pixels = noise(data.draw(SIDES), data.draw(SIDES), CHANNELS[color])
    file.write_bytes(damaged(png(pixels, data.draw(FILTERS)), data.draw))
    read = read_image if color == RGB else read_mask
    np.testing.assert_array_equal(outcome(read, file), by_pillow(read, file))


@pytest.mark.parametrize("depth", [2, 4])
def test_masks_with_scaled_gray_values_raise_an_error(file, depth):
    """Pillow reads the 4-bit gray value 1 in a PNG as 17, which may be the id of another class."""
    header = struct.pack(">IIBBBBB", 2, 1, depth, GRAY, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0\x12"))
    file.write_bytes(SIGNATURE + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b""))
    with pytest.raises(DataError, match=r"picture\.png' has fewer than 8 bits per pixel"):
        read_mask(file)


BOMBS = {
    "png": png(np.zeros((1, 1, 3), np.uint8), size=(60_000, 60_000)),
    "bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
    "ppm": b"P6 60000 60000 255\n" + bytes(30),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("read", [read_image, read_mask])
def test_small_files_that_describe_huge_images_are_rejected(tmp_path, kind, read):
    path = tmp_path / f"bomb.{kind}"
    path.write_bytes(BOMBS[kind])
    with pytest.raises(DataError, match=r"bomb\.\w+'.*(raise|max_pixels)"):
        read(path)


@pytest.mark.parametrize("kind", ["gif", "ico", "pcx"])
def test_other_formats_of_pillow_are_not_decoded(tmp_path, kind):
    Image.new("RGB", (16, 16)).save(tmp_path / f"image.{kind}")
    (tmp_path / f"image.{kind}").rename(tmp_path / "image.png")
    with pytest.raises(DataError, match=r"image\.png"):
        read_image(tmp_path / "image.png")


# ---- orientation ---------------------------------------------------------------------------------------------

_SHOWN = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[
        :, ::-1
    ],  # the first row of the file is the right side of the displayed image
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],  # the first row of the file is the left side of the displayed image
    9: lambda a: a,  # not defined by EXIF
}


@pytest.mark.parametrize("orientation", _SHOWN)
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_images_and_masks_are_read_in_their_display_orientation(tmp_path, orientation, suffix):
    pixels = np.kron(noise(3, 2, 1)[..., 0], np.ones((16, 16), np.uint8))
    file, exif = tmp_path / f"picture.{suffix}", Image.Exif()
    exif[0x0112] = orientation
    options = {"webp": dict(lossless=True), "jpg": dict(quality=100)}.get(suffix, {})
    picture = Image.fromarray(pixels)
    (picture.convert("RGB") if suffix == "webp" else picture).save(file, exif=exif, **options)
    expected = _SHOWN[orientation](pixels)
    np.testing.assert_allclose(read_image(file)[..., 0], expected, atol=2)
    if suffix in ("png", "tif"):
        np.testing.assert_array_equal(read_mask(file), expected)


@pytest.mark.parametrize(
    "metadata",
    [
        chunk(b"eXIf", b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)),
        chunk(
            b"iTXt",
            b"XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta xmlns:x='adobe:ns:meta/'><rdf:RDF "
            b'tiff:Orientation="6"></rdf:RDF></x:xmpmeta>',
        ),
    ],
    ids=["exif", "xmp"],
)
@pytest.mark.parametrize("after", [False, True])
def test_the_orientation_may_be_stored_after_the_pixels_of_a_png(file, metadata, after):
    pixels = noise(9, 7, 3)
    data = png(pixels)
    at = len(data) - 12 if after else 33  # before IEND, or after IHDR
    file.write_bytes(data[:at] + metadata + data[at:])
    np.testing.assert_array_equal(read_image(file), pixels.swapaxes(0, 1)[:, ::-1])
