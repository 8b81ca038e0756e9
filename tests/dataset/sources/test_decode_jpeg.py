"""Tests of JPEG decoding. Pixels and errors must be the same with simplejpeg, if it is installed, as with Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from slipstream.dataset.sources import decode
from slipstream.dataset.sources.decode import MAX_PIXELS, read_image
from slipstream.errors import DataError

SIDES, QUALITIES = st.integers(1, 70), st.integers(1, 100)
SUBSAMPLINGS = ["4:4:4", "4:2:2", "4:2:0"]
START_OF_FRAME = (b"\xff\xc0", b"\xff\xc2")  # baseline and progressive


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("decode") / "picture.jpg"


@pytest.fixture(autouse=True)
def requires_simplejpeg(request):
    if "without" not in request.node.name:
        pytest.importorskip("simplejpeg")


def picture(width, height, mode="RGB", seed=0):
    """Return an image with smooth areas, edges and noise, so that all frequencies occur."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    channels = [np.sin(x / rng.uniform(2, 30) + y / rng.uniform(2, 30)) * 90 + 128 for _ in range(4)]
    pixels = np.stack(channels, -1) + rng.integers(-30, 31, (height, width, 4)) * (x > width // 2)[..., None]
    pixels[height // 2 :, : width // 3] = rng.integers(0, 256, 4)
    pixels = pixels.clip(0, 255).astype(np.uint8)
    return (
        Image.fromarray(pixels, "CMYK") if mode == "CMYK" else Image.fromarray(pixels[..., :3]).convert(mode)
    )


def jpeg(image, **options):
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


def outcome(read, path):
    try:
        return read(path)
    except DataError as error:
        return str(error)


def by_pillow(read, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_decode_fast", lambda *_: None)
        return outcome(read, path)


@given(
    width=SIDES,
    height=SIDES,
    seed=st.integers(0, 99),
    mode=st.sampled_from(["RGB", "L"]),
    quality=QUALITIES,
    subsampling=st.sampled_from(SUBSAMPLINGS),
    progressive=st.booleans(),
    optimize=st.booleans(),
    restart=st.sampled_from([0, 1, 3]),
    as_rgb=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_pixels_match_pillow(
    file, width, height, seed, mode, quality, subsampling, as_rgb, restart, **options
):
    """`keep_rgb` stores the colors as RGB, which Pillow encodes without subsampling."""
    colors = dict(keep_rgb=True) if as_rgb and mode == "RGB" else dict(subsampling=subsampling)
    image = picture(width, height, mode, seed)
    file.write_bytes(jpeg(image, quality=quality, restart_marker_blocks=restart, **colors, **options))
    pixels = read_image(file)
    assert pixels.shape == (height, width, 3)
    np.testing.assert_array_equal(pixels, by_pillow(read_image, file))
    np.testing.assert_array_equal(
        decode._decode_fast(file, MAX_PIXELS, "RGB"), pixels
    )  # simplejpeg decodes the file


def test_simplejpeg_decodes_rgb_and_grayscale_files(file, monkeypatch):
    monkeypatch.setattr(decode, "_decode_with_pillow", None)
    for mode in ("RGB", "L"):
        file.write_bytes(jpeg(picture(40, 30, mode)))
        assert read_image(file).shape == (30, 40, 3)


@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied(file, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file.write_bytes(jpeg(picture(40, 30), exif=exif))
    assert (decode._decode_fast(file, MAX_PIXELS, "RGB") is None) == (2 <= orientation <= 8)
    assert read_image(file).shape == ((40, 30, 3) if 5 <= orientation <= 8 else (30, 40, 3))
    np.testing.assert_array_equal(read_image(file), by_pillow(read_image, file))


def damaged(data, draw):
    """Return the data with a changed byte, with bytes removed, duplicated or appended, or truncated."""
    at, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 20))
    match draw(st.sampled_from(["byte", "bit", "cut", "double", "truncated", "appended"])):
        case "byte":
            return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
        case "bit":
            return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        case "cut":
            return data[:at] + data[at + length :]
        case "double":
            return data[: at + length] + data[at:]
        case "appended":
            return data + draw(st.binary(max_size=20))
        case _:
            return data[: draw(st.integers(0, len(data)))]
