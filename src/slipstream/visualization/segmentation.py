"""Render segmentation results as images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from slipstream.errors import DataError
from slipstream.extras import extra

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

RGB: TypeAlias = "npt.NDArray[np.uint8]"
Palette = Sequence[Sequence[int]]

_CELL_WIDTH = 320  # width of an image, in pixels
_GAP = 12
_MARGIN = 24
_TEXT, _PALE, _PAPER = (28, 30, 33), (110, 115, 122), (255, 255, 255)
_IGNORED = (228, 230, 234)
_TITLE_SIZE, _TEXT_SIZE = 18, 15
_SWATCH = 16


def colorize(mask: npt.NDArray[Any], palette: Palette, ignore_index: int | None = None) -> RGB:
    """Convert `mask`, an array of integer class ids (H, W), to a uint8 RGB image (H, W, 3).

    Ignored pixels have the color `ignored_color(palette)`.

    Raises:
        DataError: if `mask` contains a class id that has no color in `palette`.
    """
    ignored = np.zeros(mask.shape, bool) if ignore_index is None else mask == ignore_index
    invalid = ~ignored & ((mask < 0) | (mask >= len(palette)))
    if invalid.any():
        ids = np.unique(mask[invalid])[:5].tolist()
        raise DataError(
            f"the mask contains the class ids {ids}, but the palette has {len(palette)} colors; set ignore_index"
        )
    colors = np.array([*palette, ignored_color(palette)], dtype=np.uint8)
    return colors[np.where(ignored, len(palette), mask.astype(np.int64))]


def ignored_color(palette: Palette) -> tuple[int, int, int]:
    """Return the color of ignored pixels: black, or pale gray if black is the color of a class."""
    return _IGNORED if [0, 0, 0] in [list(map(int, color)) for color in palette] else (0, 0, 0)


def overlay(
    image: RGB,
    mask: npt.NDArray[Any],
    palette: Palette,
    alpha: float = 0.5,
    ignore_index: int | None = None,
) -> RGB:
    """Return `image` blended with the class colors of `mask`, as a uint8 array (H, W, 3).

    Args:
        image: RGB image, uint8 (H, W, 3).
        mask: integer class ids (H, W).
        palette: one RGB color per class.
        alpha: weight of the class colors, from 0 (image only) to 1 (colors only).
        ignore_index: class id of pixels that keep the image's color.

    Raises:
        DataError: if the sizes differ, or the mask contains an unknown class id.
    """
    if image.shape != (*mask.shape, 3):
        raise DataError(
            f"the image has shape {image.shape}, but the mask has shape {mask.shape}; resize one of them"
        )
    mixed = image * (1 - alpha) + colorize(mask, palette, ignore_index) * alpha
    tinted = np.rint(mixed).astype(np.uint8)
    return tinted if ignore_index is None else np.where((mask == ignore_index)[..., None], image, tinted)


def contact_sheet(
    rows: Sequence[Sequence[RGB]],
    titles: Sequence[str] = ("image", "truth", "prediction"),
    captions: Sequence[str | Sequence[str]] = (),
    legend: Sequence[tuple[str, Sequence[int]]] = (),
) -> Image.Image:
    """Return a grid of images, each 320 pixels wide, with column titles and a legend of the classes.

    Args:
        rows: images, uint8 (H, W, 3); each row has one image per title.
        titles: titles of the columns.
        captions: for each row, one caption or one caption per image; empty for no captions.
        legend: names and RGB colors of the classes.
    """
    with extra("images"):
        from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_TEXT_SIZE)
    cells = [[_resize(Image.fromarray(picture)) for picture in row] for row in rows]
    columns = [_MARGIN + column * (_CELL_WIDTH + _GAP) for column in range(len(titles))]
    width = columns[-1] + _CELL_WIDTH + _MARGIN
    caption_height = _TEXT_SIZE + 8 if captions else 0
    heights = [max(cell.height for cell in row) + caption_height + _GAP for row in cells]
    entries, legend_height = _legend_layout(legend, width, font)
    top = _MARGIN + _TITLE_SIZE + 10
    sheet = Image.new("RGB", (width, top + sum(heights) + legend_height + _MARGIN - _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for x, title in zip(columns, titles, strict=True):
        draw.text((x, top - 10), title, _TEXT, ImageFont.load_default(_TITLE_SIZE), anchor="ls")
    for index, row in enumerate(cells):
        for x, cell in zip(columns, row, strict=True):
            sheet.paste(cell, (x, top))
        top += heights[index]
        caption = captions[index] if captions else ()
        for x, line in zip(columns, [caption] if isinstance(caption, str) else caption, strict=False):
            draw.text((x, top - _GAP - 7), line, _PALE, font, anchor="ls")
    for x, y, name, color in entries:
        box = (x, top + 4 + y, x + _SWATCH, top + 4 + y + _SWATCH)
        draw.rectangle(box, fill=tuple(int(c) for c in color), outline=_PALE)
        draw.text((x + _SWATCH + 6, box[1] + _SWATCH // 2), name, _TEXT, font, anchor="lm")
    return sheet


def _resize(picture: Image.Image) -> Image.Image:
    from PIL import Image

    height = max(1, round(picture.height * _CELL_WIDTH / picture.width))
    # NEAREST keeps class boundaries sharp when an image is enlarged.
    resample = Image.Resampling.NEAREST if picture.width < _CELL_WIDTH else Image.Resampling.BOX
    return picture.resize((_CELL_WIDTH, height), resample)


_Entry = tuple[int, int, str, Sequence[int]]  # left, top, name, color


def _legend_layout(
    legend: Sequence[tuple[str, Sequence[int]]], width: int, font: Any
) -> tuple[list[_Entry], int]:
    """Return the position of each legend entry, wrapped at the sheet width, and the height of the legend."""
    line_height, x, y, entries = _SWATCH + 10, _MARGIN, 0, []
    for name, color in legend:
        size = _SWATCH + 6 + int(font.getlength(name)) + 20
        if x > _MARGIN and x + size > width - _MARGIN:
            x, y = _MARGIN, y + line_height
        entries.append((x, y, name, color))
        x += size
    return entries, y + line_height + 4 if entries else 0
